"""D2SD: two block-diffusion drafters, one prefix tree (arXiv 2606.04446)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from dflash_mlx.core.option import Options, option
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.block_diffusion import choices, contexts_of, dflash_method
from dflash_mlx.drafters.dflash.block_model import Ask, BlockModel
from dflash_mlx.drafters.growth.grow import (
    Choices,
    Offers,
    Path,
    best_first,
    likeliest,
    likely_boundaries,
    mix,
)
from dflash_mlx.drafters.method import (
    DRAFT,
    EARLIER,
    SECOND_DRAFT,
    FirstDraft,
    Plan,
    TwoPass,
    branches_option,
    check_block_size,
)
from dflash_mlx.drafters.networks.model import DraftContext
from dflash_mlx.engine.drafter import Drafter, Proposal, columns_of
from dflash_mlx.engine.state import Kind, State
from dflash_mlx.verifier.block import Saved, join, split

Drafts = Mapping[Path, Choices]  # what was drafted behind each prefix
BRANCHES = 4  # prefixes that are continued, unless asked for others


@dataclass(frozen=True)
class DualContext:
    """The contexts of several networks, fed from one set of features."""

    contexts: tuple[DraftContext, ...]
    layers: tuple[tuple[int, ...], ...]  # that each reads
    aux_layers: tuple[int, ...]  # whose features come

    @property
    def length(self) -> int:
        return self.contexts[0].length

    @property
    def arrays(self) -> list[mx.array]:
        return [array for context in self.contexts for array in context.arrays]

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        for context, layers in zip(self.contexts, self.layers, strict=True):
            context.append(tokens, columns_of(features, self.aux_layers, layers))

    def refill_from(self, length: int) -> int:
        return min(context.refill_from(length) for context in self.contexts)

    def trim(self, length: int) -> None:
        for context in self.contexts:
            context.trim(length)

    @property
    def kind(self) -> Kind:
        kinds = [context.kind for context in self.contexts]
        networks = tuple(network for own, _ in kinds for network in own)
        return networks, (self.layers, self.aux_layers, *(settings for _, settings in kinds))

    def fork(self) -> DualContext:
        return replace(self, contexts=tuple(context.fork() for context in self.contexts))

    def saved(self) -> Saved:
        return join(context.saved() for context in self.contexts)

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        for context, own in zip(self.contexts, split(saved), strict=True):
            context.restore(own, tokens)


class JointGrowth:
    """Best-first over the distributions of both drafters.

    branches: K prefixes, of any likely path through the first draft's choices. nodes: of the tree,
    the root included. The first draft keeps a share in what the second says behind a prefix: the
    second knows the prefix, but two drafters err in different places.
    """

    ROOT_SHARE = 0.5  # of the first drafter where neither sees more than the anchor
    FIRST_SHARE = 0.3  # of the first drafter behind a prefix; 0.15 and 0.3 are alike

    def __init__(self, branches: int, nodes: int) -> None:
        self._branches, self._nodes = branches, nodes

    def prefixes(self, first: Choices, second: Drafts, longest: int) -> dict[Path, float]:
        """The likeliest places of a rejection; of several, the empty path is one, unless known."""
        both = self._both(first, second)
        found = likely_boundaries(both, self._branches, longest, known=second)
        if second or () in found or self._branches == 1:
            return found
        root = likely_boundaries(both, 1, 0)
        return likeliest(root | likeliest(found, self._branches - 1), self._branches)

    def tree(self, first: Choices, second: Drafts) -> Tree:
        return best_first(self._both(first, second), self._nodes, second)

    def _both(self, first: Choices, second: Drafts) -> Choices:
        longest = max(map(len, second), default=-1)

        def choices(path: Path) -> Offers | None:
            alone = first(path)
            for length in range(min(longest, len(path)), -1, -1):
                nearest = second.get(path[:length])
                if nearest and (offers := nearest(path[length:])) is not None:
                    share = self.FIRST_SHARE if length else self.ROOT_SHARE
                    return mix(offers, alone, share) if alone else offers
            return alone

        return choices


class DualDiffusion(TwoPass):
    """First draft, K second drafts in one pass over one shared context, one tree.

    second: the variable-prefix drafter; without it the first continues its own prefixes (the
    paper's ablation). Its blocks can be longer: then one branch can continue the whole first draft.
    sizes: of their blocks, None for what they were trained for; DFlashError for a size that a
    drafter was not trained for.
    """

    name = "d2sd"
    rounds_ahead = 0

    def __init__(
        self,
        first: BlockModel,
        second: BlockModel | None,
        growth: JointGrowth,
        sizes: Sequence[int | None] = (None, None),
    ) -> None:
        self._models = (first,) if second is None else (first, second)
        for size, model, prefix in zip(sizes, self._ends, ("", "second_"), strict=True):
            check_block_size(size, model.block_size, f"{prefix}block_size")
        known = (model.block_size for model in self._ends)
        self._sizes = [size or most for size, most in zip(sizes, known, strict=True)]
        self.aux_layers = tuple(sorted({tap for model in self._models for tap in model.aux_layers}))
        self._growth, self._longest = growth, self._sizes[1]  # of what a branch goes on with

    @property
    def _ends(self) -> tuple[BlockModel, BlockModel]:
        return self._models[0], self._models[-1]

    def new_context(self) -> DualContext:
        contexts = tuple(model.new_context() for model in self._models)
        layers = tuple(model.aux_layers for model in self._models)
        return DualContext(contexts, layers, self.aux_layers)

    def first_pass(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        asks = [
            Ask(contexts_of(state)[0], state.anchor, min(self._sizes[0], remaining))
            for state, remaining in zip(states, rooms, strict=True)
        ]
        drafts = [FirstDraft(Tree.chain()) for _ in rooms]
        for i, found in enumerate(choices(self._ends[0], asks)):
            for first in found:
                tree, branches = self._growth.tree(first, {}), self._prefixes(first, {}, rooms[i])
                drafts[i] = FirstDraft(tree, remaining=rooms[i], choices=first, branches=branches)
        return drafts

    def _prefixes(self, first: Choices, second: Drafts, remaining: int) -> dict[Path, float]:
        ahead, behind = (min(size, remaining) for size in self._sizes)
        if len(self._models) == 1 and ahead == behind:
            second = {(): first, **second}  # the same pass again would say the same
        return self._growth.prefixes(first, second, min(self._longest, remaining) - 2)

    def second_pass(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        chosen = [list(draft.branches)[:n] for draft, n in zip(drafts, counts, strict=True)]
        found = zip(drafts, self.behind(states, drafts, chosen), strict=True)
        return [
            Proposal(self._growth.tree(first, second))
            if (first := draft.choices) and second
            else draft
            for draft, second in found
        ]

    def behind(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], chosen: Sequence[list[Path]]
    ) -> list[dict[Path, Choices]]:
        """For each sequence what the second drafter offers after each of the chosen prefixes."""
        size = self._sizes[1]
        asks = [
            Ask(contexts_of(state)[-1], state.anchor, min(size, draft.remaining), prefixes)
            for state, draft, prefixes in zip(states, drafts, chosen, strict=True)
        ]
        found = zip(chosen, choices(self._ends[1], asks), strict=True)
        return [dict(zip(prefixes, each, strict=True)) for prefixes, each in found]


@dataclass(frozen=True)
class DualOptions(Options):
    """The options of `d2sd`."""

    branches: int | None = branches_option(
        f"prefixes that the second drafter continues (default: {BRANCHES}); makes auto d2sd where "
        "the target can verify trees",
        "Branches",
    )
    second_block_size: int | None = option(
        None,
        "tokens per block of the second drafter, the anchor included (default: its own)",
        label="Tokens in a block of the second draft",
        least=2,
        type=int,
    )

    @property
    def later_blocks(self) -> dict[str, int | None]:
        return {"second_block_size": self.second_block_size}

    def growth_of(self, how: Plan) -> JointGrowth:
        return JointGrowth(self.branches or BRANCHES, how.nodes)

    def drafter(self, *parts: Any) -> DualDiffusion:
        return DualDiffusion(*parts)


def _make(how: Plan) -> Drafter:
    options = cast(DualOptions, how.config.options)
    first, second = [*how.models, None][:2]
    sizes = how.config.block_size, options.second_block_size
    return options.drafter(first, second, options.growth_of(how), sizes)


METHOD = dflash_method(
    "d2sd",
    "DFlash + variable-prefix",
    _make,
    DualOptions,
    lone_label="DFlash, continuing itself",
    best_with=2,
    needs_trees=True,
    has_budget=True,
    sources=(DRAFT, SECOND_DRAFT, *EARLIER),
    preference=4,
)
