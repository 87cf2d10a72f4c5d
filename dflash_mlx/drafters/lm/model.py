"""A language model of its own as a draft model: what it keeps of a sequence, and its drafts.

Its passes are a `Target`'s, so its caches take trees and go back, with windows and recurrent layers
as well. Rows of later steps of a draft lie behind those of earlier ones. A recurrent layer has no
such place: of a chain it goes on from its state after the last step, and of a tree every step
passes all rows again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.growth.grow import Array
from dflash_mlx.drafters.networks.files import Quantization
from dflash_mlx.drafters.networks.model import Draft, DraftHead
from dflash_mlx.drafters.networks.tokens import TokenContext
from dflash_mlx.engine.state import Context, Kind, State
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

BLOCK = 8  # tokens of a draft at most, the anchor included; the budget stops earlier


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """What the config.json of a language model says, as far as drafting asks for it."""

    model_type: str
    vocab_size: int  # 0 where the file does not say
    context_length: int  # 0 where the file does not say
    quantization: Quantization | None  # of the weights in its files, by MLX
    notes: tuple[str, ...] = ()
    block_size: ClassVar[int] = BLOCK
    aux_layers: ClassVar[tuple[int, ...]] = ()

    def layers_read(self, layers: int) -> tuple[int, ...]:
        """None of a target with so many."""
        return ()

    def problems(self) -> dict[str, Any]:
        """Known of its files alone."""
        return {}


class LanguageContext(TokenContext):
    """The language model's own caches of committed tokens."""

    def read(self, tokens: mx.array) -> None:
        self._model.forward(tokens, self._cache, Block(tokens.size, last_only=True))
        self._cache.commit(range(tokens.size))
        self._cache.mark_chunk()
        mx.async_eval(self._cache.arrays)

    def way_back(self, length: int) -> int:
        return self._cache.nearest(length)

    @property
    def kind(self) -> Kind:
        networks, settings = super().kind
        return networks, (repr(getattr(self._network, "args", None)), settings)


class LanguageModel:
    """A language model that drafts for a target.

    own: the language model; its vocabulary may have more or fewer unused tokens at its end than the
    target's.
    """

    family: ClassVar[str] = "lm"
    aux_layers: tuple[int, ...] = ()

    def __init__(self, own: Target, config: LanguageConfig, target: Target) -> None:
        self.own, self.config = own, config
        self.module: nn.Module = own.model
        self.takes_trees, self.prefers_chains = own.takes_trees, own.is_recurrent
        self._known, vocabulary = _vocabulary(own), _vocabulary(target)
        self.head = DraftHead(lambda logits: logits, vocabulary, own.kernels)
        # Tokens that a target has beyond those, if any, stand for none, so the last one may do
        self._fill = vocabulary - self._known

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def new_context(self) -> LanguageContext:
        return LanguageContext(self, self.own.new_cache())

    def limit_vocabulary(self, target: Target, tokens: Array, size: int) -> None:
        """Its head is its own, so it drafts all of them."""

    def try_out(self, context: Context) -> mx.array:
        draft = LanguageDraft(self, cast(LanguageContext, context))
        logits = draft.logits(mx.zeros(1, mx.int32), [-1])
        known = logits[:, : self._known]  # beyond these all are -inf
        return mx.concatenate([known, mx.zeros_like(logits[:, self._known :])], axis=-1)

    def begin(self, state: State) -> LanguageDraft:
        return LanguageDraft(self, cast(LanguageContext, state.context))

    def forward(self, tokens: mx.array, cache: SequenceCache, block: Block) -> mx.array:
        """Logits over the target's vocabulary, [n, V] of all rows or [1, V] of the last alone."""
        if self._fill > 0:
            tokens = mx.minimum(tokens, self._known - 1)
        logits, _ = self.own.forward(tokens, cache, block)
        if self._fill > 0:
            return mx.pad(logits, [(0, 0), (0, self._fill)], constant_values=-mx.inf)
        return logits[:, : self._known + self._fill]


def _vocabulary(model: Target) -> int:
    """Tokens that it has logits for; nothing is computed."""
    logits, _ = model.forward(mx.zeros(1, mx.int32), model.new_cache(), Block(1))
    return logits.shape[-1]


class LanguageDraft(Draft):
    """Its first row passes together with the tokens that waited."""

    def __init__(self, model: LanguageModel, context: LanguageContext) -> None:
        super().__init__(model.head)
        self._forward, self._context = model.forward, context
        self._is_recurrent = model.own.is_recurrent
        self._cache = context.cache
        self._rows: list[mx.array] = []  # tokens of all rows, step by step
        self._parents: list[int] = []

    def states(self, tokens: mx.array, parents: list[int]) -> mx.array:
        """Logits [n, V], which its head leaves as they are."""
        before, tokens = len(self._parents), tokens.astype(mx.int32)
        self._parents += parents
        self._rows.append(tokens)
        if not before:
            return self._anchor(tokens)
        tree = Tree((0,) * (len(self._parents) - 1), tuple(self._parents))
        if self._is_recurrent and not tree.is_chain:
            cache = self._context.cache
            logits = self._forward(mx.concatenate(self._rows), cache, Block.of(tree))
            cache.discard()
            return logits[before:]
        logits = self._forward(tokens, self._cache, Block.of(tree, before))
        self._keep_states(len(parents))
        return logits

    def _anchor(self, anchor: mx.array) -> mx.array:
        """[1, V] after the first row; what waited before it is committed."""
        cache, text = self._context.cache, self._context.take_waiting()
        rows = mx.concatenate([text, anchor])
        logits = self._forward(rows, cache, Block(rows.size, last_only=True))
        if self._is_recurrent:
            self._cache = cache.beside()
            cache.commit(range(text.size))
            self._keep_states(rows.size)
        else:
            cache.commit(range(text.size))
        return logits

    def _keep_states(self, rows: int) -> None:
        """Let recurrent states of the draft's own go on behind these rows of a pass."""
        for part in self._cache.parts:
            if part.tail:
                part.commit(range(rows))
            else:
                part.discard()
