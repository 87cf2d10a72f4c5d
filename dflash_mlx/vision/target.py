"""mlx-vlm's models as targets: their language models verify, their towers give rows of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import CHAINS, SAME, Target
from dflash_mlx.verifier.sequence import Rows, SequenceCache
from dflash_mlx.vision.eyes import Eyes
from dflash_mlx.vision.language import Language
from dflash_mlx.vision.pieces import Embedded, Mutual, Sight
from dflash_mlx.vision.positions import Positions

# Families whose answers about pictures are mlx-vlm's own, but for what sees what in a picture of
# Gemma's: there it is as in transformers. Only what the tests try is here.
SEEING = frozenset({
    "gemma3", "gemma4", "glm4v", "idefics3", "lfm2_vl", "muse_glimmer", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl", "smolvlm",
})  # fmt: skip
_BEFORE = 4  # tokens before those by which a family is tried
_CHAIN, _TREE = Tree((5, 6, 7), (-1, 0, 1, 2)), Tree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1, 4))


class SeeingTarget(Target):
    """A model of mlx-vlm's, as it is loaded there.

    folder: where its processor is. Raises DFlashError for one that cannot take drafts back.
    """

    def __init__(
        self, whole: Any, context_length: int, name: str, folder: Path | None = None
    ) -> None:
        self.eyes = Eyes(whole, name, folder)
        self.family = type(whole).__module__.split(".")[-2]
        self.sees = self.family in SEEING
        # Whether positions are frames, rows and columns (M-RoPE) instead of counters
        self.turns = hasattr(whole.language_model, "get_rope_index")
        super().__init__(Language(whole), context_length, name)
        if not self._follows(_CHAIN):
            what = f"{name} ({self.family}) does not go on as if a draft had never been there"
            raise DFlashError(what, "choose a model of another family")

    def new_cache(self) -> SequenceCache:
        cache = super().new_cache()
        return SequenceCache(cache.layers, [*cache.parts, Positions()]) if self.turns else cache

    def embed(self, prompt: Prompt, first: int, last: int) -> mx.array | None:
        sights = [p for p in prompt.pieces if isinstance(p, Sight)]
        there = [s for s in sights if s.start < last and first < s.start + s.length]
        if not there:
            return None
        text = self.eyes.whole.get_input_embeddings(mx.array([prompt.tokens[first:last]]))
        rows, at, deeper = text.inputs_embeds[0], [], []
        for sight in there:
            assert sight.look is not None
            look = sight.look()
            inside = [i for i, place in enumerate(sight.places) if first <= place < last]
            places = [sight.places[i] - first for i in inside]
            if inside:
                rows[mx.array(places)] = look.rows[mx.array(inside)].astype(rows.dtype)
                at += places
                deeper += [] if look.deeper is None else [look.deeper[:, mx.array(inside)]]
        beside = {}
        if text.per_layer_inputs is not None:
            beside["per_layer_inputs"] = text.per_layer_inputs
        if deeper:
            is_picture = np.isin(np.arange(last - first), at)
            beside["visual_pos_masks"] = mx.array(is_picture[None])
            beside["deepstack_visual_embeds"] = mx.concatenate(deeper, axis=1)
        ends = [(s.start - first, s.start + s.length - first) for s in there if s.whole]
        mutual = tuple((max(0, begin), end) for begin, end in ends)
        return Embedded(rows, beside, sights[0].table, mutual)

    def forward(
        self,
        tokens: mx.array,
        cache: SequenceCache,
        block: Block,
        aux_layers: tuple[int, ...] = (),
        embeddings: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        if block.tree is not None:
            self.check_trees()  # which has passes of its own
        if isinstance(embeddings, Embedded) and embeddings.mutual:
            spans, windowed = embeddings.mutual, self.family == "gemma4"
            block = Mutual(block.rows, last_only=block.last_only, spans=spans, windowed=windowed)
        self._give([(cache, block)], embeddings)
        return super().forward(tokens, cache, block, aux_layers, embeddings)

    def _together(
        self, sequences: Sequence[Rows], aux_layers: tuple[int, ...]
    ) -> list[tuple[mx.array, mx.array | None]]:
        self._give([(each.cache, each.block) for each in sequences])
        return super()._together(sequences, aux_layers)

    def _give(
        self, parts: Sequence[tuple[SequenceCache, Block]], embeddings: mx.array | None = None
    ) -> None:
        """Tell the model what the next pass takes beside tokens and caches."""
        beside, table = {}, None
        if isinstance(embeddings, Embedded):
            beside, table = dict(embeddings.beside), embeddings.table
        if self.turns:
            known = [(cache.parts[-1], block) for cache, block in parts]
            places = [p.of(block, table) for p, block in known if isinstance(p, Positions)]
            beside["position_ids"] = mx.array(np.concatenate(places, axis=1)[:, None])
        self.model.give(beside)

    @cached_property
    def takes_trees(self) -> bool:
        vars(self)["takes_trees"] = True  # while it is tried
        try:
            return self._follows(_TREE)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # asks for more
            return False

    def check_trees(self) -> None:
        if not self.takes_trees:
            what = (
                f"{self.name} ({self.family}) gives nodes of a tree other logits than their paths"
            )
            raise DFlashError(f"{what}, so it cannot verify trees", CHAINS)

    def _follows(self, tree: Tree) -> bool:
        """Whether rows get the logits of their own paths, also behind a path that was kept."""
        path = [int(node) for node in np.flatnonzero(tree.ancestors[-1])]
        begin, tokens = [*range(_BEFORE)], [_BEFORE, *tree.drafted]
        own = [tokens[node] for node in path]
        cache = self.new_cache()
        self._read(cache, begin)
        found = self.forward(mx.array(tokens), cache, Block.of(tree))[0][mx.array(path)]
        cache.commit(path[:-1])
        again = self.forward(mx.array(own[-1:]), cache, Block(1))[0]
        expected = self._read(self.new_cache(), begin + own)[-len(own) :]
        apart = mx.concatenate([found - expected, again - expected[-1:]])
        return bool(mx.all(mx.abs(apart) <= SAME * mx.std(expected)))

    def _read(self, cache: SequenceCache, tokens: list[int]) -> mx.array:
        logits = self.forward(mx.array(tokens), cache, Block(len(tokens)))[0]
        cache.commit(range(len(tokens)))
        return logits
