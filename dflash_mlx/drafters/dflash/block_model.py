"""A drafter network bound to its target: logits of blocks, whatever tree they become."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.drafters.dflash.network import Links, Network, NetworkConfig
from dflash_mlx.drafters.dflash.paths import Candidates
from dflash_mlx.drafters.growth.grow import Array, Choices, Linked, Ranked, follow, follow_links
from dflash_mlx.drafters.networks.model import BoundModel, DraftContext
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

Shown = Sequence[Sequence[int]]  # drafted tokens that each block shows unmasked


class Ask(NamedTuple):
    """A block of `rows` to be drafted behind a context, once for each prefix. anchor: [1]."""

    context: FeatureContext
    anchor: mx.array
    rows: int
    prefixes: Shown = ((),)

    @property
    def parts(self) -> list[slice]:
        """Where, of all rows that draft, those behind each prefix are."""
        ends = [0, *accumulate(self.rows - 1 - len(prefix) for prefix in self.prefixes)]
        return [slice(*part) for part in pairwise(ends)]


class FeatureContext(DraftContext):
    """Keys and values of the committed tokens' features, per layer."""

    def take_in(self, tokens: mx.array, features: mx.array) -> None:
        self._network.append(features, self._cache)


class BlockModel(BoundModel[FeatureContext]):
    """A DFlash network bound to its target."""

    family = "dflash"
    context = FeatureContext

    def __init__(self, network: Network, config: NetworkConfig, target: Target) -> None:
        super().__init__(network, config, target)
        self._scale *= config.input_embedding_scale
        # What knows the token before each draft, see `candidates` and `choices`
        self.links: Links | None = network.links(self.embed)
        if self.links is not None:
            self.least_vocabulary = self.links.top_k

    def tried(self, context: FeatureContext) -> mx.array:
        return self.logits(context, mx.zeros(1, mx.int32), self.block_size)

    def logits(
        self, context: FeatureContext, anchor: mx.array, rows: int, prefixes: Shown = ((),)
    ) -> mx.array:
        """[n, V] for what follows each prefix in a block of `rows`, one prefix after the other.

        anchor: [1]. prefixes: drafted tokens that the block shows unmasked (D2SD's second draft,
        arXiv 2606.04446, 3.3); a prefix of l tokens has rows - 1 - l masks. All blocks go through
        the network in one pass over the one context.
        """
        return self.head.whole(self._states(Ask(context, anchor, rows, prefixes)), context.words)

    def likeliest(self, context: FeatureContext, anchor: mx.array, rows: int) -> mx.array:
        """Tokens [rows - 1], each the likeliest at its position; the pass may still be running."""
        return self.head.likeliest(self._states(Ask(context, anchor, rows)), context.words)

    def candidates(self, context: FeatureContext, anchor: mx.array, rows: int) -> Candidates:
        """What the paths of a linked drafter can go through in a block of `rows`."""
        assert self.links is not None
        states = self._states(Ask(context, anchor, rows))
        logits, ids = self.head.logits(states, context.words)
        known = None if ids is None else mx.array(ids)
        return self.links.candidates(states, logits, anchor, known)

    def choices(self, asks: Sequence[Ask], width: int) -> list[list[Choices]]:
        """What can follow each prefix of each block; of all in one pass, and waits for it.

        width: most tokens behind a path.
        """
        if not asks:
            return []
        joins = self.module.joins
        states = self._together(asks) if joins else [self._states(ask) for ask in asks]
        logits = self.head.logits_of_all(states, [ask.context.words for ask in asks])
        of_each = zip(asks, states, logits, strict=True)
        if self.links is None:
            ranked = (self._ranked(ask, *found, width) for ask, _, found in of_each)
            return [[follow(draft) for draft in drafts] for drafts in ranked]
        linked = (self._linked(ask, part, *found) for ask, part, found in of_each)
        return [[follow_links(draft, width) for draft in drafts] for drafts in linked]

    def _ranked(self, ask: Ask, logits: mx.array, ids: Array | None, width: int) -> list[Ranked]:
        whole = self.head.rank(logits, ids, width)
        return [Ranked(whole.tokens[part], whole.logprobs[part]) for part in ask.parts]

    def _linked(
        self, ask: Ask, states: mx.array, logits: mx.array, ids: Array | None
    ) -> list[Linked]:
        assert (links := self.links) is not None
        known = None if ids is None else mx.array(ids)

        def rank(scores: mx.array) -> Ranked:
            return self.head.rank(scores, ids, links.top_k)

        found = []
        for prefix, part in zip(ask.prefixes, ask.parts, strict=True):
            shown = mx.concatenate([ask.anchor, mx.array([*prefix], ask.anchor.dtype)])
            found.append(links.linked(states[part], logits[part], shown, known, rank))
        return found

    def _states(self, ask: Ask) -> mx.array:
        return self._together([ask])[0]

    def _together(self, asks: Sequence[Ask]) -> list[mx.array]:
        """[n, d] final states of the rows that draft, the masks, of each block; in one pass.

        A drafter that samples from its anchor drafts the token behind each row: its block is a row
        shorter, and the last row that it is shown drafts, too.
        """
        rows = [self._rows(ask) for ask in asks]
        blocks = [
            (ask.context.cache, Block(tokens.size, branches=len(ask.prefixes)))
            for ask, (tokens, _) in zip(asks, rows, strict=True)
        ]
        x = self.embed(mx.concatenate([tokens for tokens, _ in rows])[None])
        states = self.module(x, blocks).astype(x.dtype)[0]
        ends = [*accumulate(tokens.size for tokens, _ in rows)]
        parts = mx.split(states, ends[:-1]) if len(asks) > 1 else [states]
        return [part[drafting] for part, (_, drafting) in zip(parts, rows, strict=True)]

    def _rows(self, ask: Ask) -> tuple[mx.array, slice | mx.array]:
        """The tokens of an ask's blocks, one block after the other, and which rows draft."""
        config, first = self.config, int(not self.config.sample_from_anchor)
        size = ask.rows - 1 + first
        blocks: list[mx.array] = []
        drafting: list[int] = []
        for i, prefix in enumerate(ask.prefixes):
            masks = [config.mask_token_id] * (size - 1 - len(prefix))
            blocks += [ask.anchor, mx.array([*prefix, *masks], dtype=ask.anchor.dtype)]
            drafting += range(i * size + first + len(prefix), (i + 1) * size)
        is_end = drafting[0] + len(drafting) == size * len(ask.prefixes)
        return mx.concatenate(blocks), slice(drafting[0], None) if is_end else mx.array(drafting)
