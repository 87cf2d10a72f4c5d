"""D2SD: two block-diffusion drafters, one prefix tree (arXiv 2606.04446)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.budget import MOST_NODES, within_budget
from dflash_mlx.drafters.dflash import checkpoint
from dflash_mlx.drafters.dflash.block_model import Ask, BlockModel
from dflash_mlx.drafters.dflash.context import DualContext
from dflash_mlx.drafters.growth.grow import (
    FIRST,
    SECOND,
    Choices,
    Offers,
    Path,
    best_first,
    likeliest,
    likely_boundaries,
    mix,
    rejection_boundaries,
    walk,
)
from dflash_mlx.drafters.growth.rank import TOP_K
from dflash_mlx.drafters.method import (
    BRANCHES,
    DRAFT,
    LOOKUP,
    SECOND_DRAFT,
    Method,
    check_block_size,
)
from dflash_mlx.drafters.one_draft import block_models, contexts_of
from dflash_mlx.drafters.two_pass import FirstDraft, TwoPass, legal
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State

Drafts = Mapping[Path, Choices]  # what was drafted behind each prefix
Chain = tuple[Path, list[float], str]  # tokens, their log-probabilities, whose they are


class PaperGrowth:
    """As published: K continuations of the first draft where it is likely to be rejected.

    branches: K. Nothing is pruned; equal prefixes share their nodes. apart: a branch is for the
    case that the draft which it leaves fails there, so it begins with another token than that one
    goes on with (not in the paper).
    """

    def __init__(self, branches: int, apart: bool = False) -> None:
        self._branches, self._apart = branches, apart

    def prefixes(self, first: Choices, second: Drafts, longest: int) -> dict[Path, float]:
        """Those with the largest rejection-boundary posterior r(i), and the whole first draft.

        Each with its posterior. second: the branches so far, which the third level continues
        likewise. longest: tokens behind which there is still something to draft.
        """
        chains = self._chains(first, second)
        likely: dict[Path, float] = {}
        for chain, logprobs, _ in chains:
            for i, r in enumerate(rejection_boundaries(np.exp(np.array(logprobs)))):
                if i <= longest and chain[:i] not in second:
                    likely[chain[:i]] = max(likely.get(chain[:i], 0.0), float(r))
        chosen = likeliest(likely, self._branches)
        whole, logprobs, _ = chains[0]
        if len(whole) <= longest and whole not in second:
            chosen[whole] = math.exp(sum(logprobs))
        return likeliest(chosen, len(chosen))

    def tree(self, first: Choices, second: Drafts) -> Tree:
        """The first draft and its continuations, merged."""
        return Tree.of_chains(self._chains(first, second))

    def _chains(self, first: Choices, second: Drafts) -> list[Chain]:
        """The first draft, then the branches, all from the root on."""
        chains: list[Chain] = [(*walk(first), FIRST)]
        for prefix, choices in second.items():
            if choices is first:  # a drafter that continues itself
                continue
            end = len(prefix)
            left, known = next(
                (chain, known) for chain, known, _ in chains if chain[:end] == prefix
            )
            path, logprobs = walk(choices, left[end : end + 1] if self._apart else ())
            chains.append(((*prefix, *path), [*known[:end], *logprobs], SECOND))
        return chains


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
        """The paths after which a rejection is likeliest.

        Where there are several, the empty one is among them, unless it is known already.
        """
        both = self._both(first, second)
        found = likely_boundaries(both, self._branches, longest, known=second)
        if second or () in found or self._branches == 1:
            return found
        root = likely_boundaries(both, 1, 0)
        return likeliest(root | likeliest(found, self._branches - 1), self._branches)

    def tree(self, first: Choices, second: Drafts) -> Tree:
        """The likeliest prefixes, each token as the best informed drafts see it."""
        return best_first(self._both(first, second), self._nodes, second)

    def _both(self, first: Choices, second: Drafts) -> Choices:
        """Choices from the draft with the longest prefix in common, and from the first."""
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


Growth = PaperGrowth | JointGrowth  # how two drafts become one tree


class DualDiffusion(TwoPass):
    """First draft, K second drafts in one pass over one shared context, one tree.

    second: the variable-prefix drafter; None lets the first drafter continue its own prefixes (the
    paper's ablation). Its blocks can be longer than the first's: then one branch can continue the
    whole first draft, unless `config.extension` is off. With three `config.levels` the second
    drafter continues its own branches, too. Raises DFlashError for a block size that a drafter was
    not trained for.
    """

    name = "d2sd"
    rounds_ahead = 0

    def __init__(
        self, first: BlockModel, second: BlockModel | None, config: DecodeConfig, growth: Growth
    ) -> None:
        self._models = (first,) if second is None else (first, second)
        asked = config.block_size, config.second_block_size
        for size, model, option in zip(asked, self._ends, ("", "second_"), strict=True):
            check_block_size(size, model.block_size, f"{option}block_size")
        known = (model.block_size for model in self._ends)
        self._sizes = [size or most for size, most in zip(asked, known, strict=True)]
        self.aux_layers = tuple(sorted({tap for model in self._models for tap in model.aux_layers}))
        self._levels, self._extends, self._growth = config.levels, config.extension, growth

    @property
    def _ends(self) -> tuple[BlockModel, BlockModel]:
        """What drafts first, and what continues it."""
        return self._models[0], self._models[-1]

    def new_context(self) -> DualContext:
        """Empty contexts for one sequence; a lone drafter needs only one."""
        columns = tuple(
            tuple(self.aux_layers.index(tap) for tap in model.aux_layers) for model in self._models
        )
        contexts = tuple(model.new_context() for model in self._models)
        return DualContext(contexts, columns, len(self.aux_layers))

    def first_pass(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        """First drafts of all, in one pass; roots alone where there is room for no more."""
        asks = [
            Ask(contexts_of(state)[0], state.anchor, min(self._sizes[0], remaining))
            for state, remaining in zip(states, rooms, strict=True)
            if remaining > 1
        ]
        found = iter(self._ends[0].choices(asks, TOP_K))
        return [
            self._begun(next(found)[0], remaining) if remaining > 1 else FirstDraft(Tree.chain())
            for remaining in rooms
        ]

    def _begun(self, choices: Choices, remaining: int) -> FirstDraft:
        tree, branches = self._growth.tree(choices, {}), self._prefixes(choices, {}, remaining)
        return FirstDraft(tree, remaining=remaining, choices=choices, branches=branches)

    def _prefixes(self, first: Choices, second: Drafts, remaining: int) -> dict[Path, float]:
        ahead, behind = (min(size, remaining) for size in self._sizes)
        if len(self._models) == 1 and ahead == behind:
            second = {(): first, **second}  # the same pass again would say the same
        rows = self._sizes[1] if self._extends else min(self._sizes)
        return self._growth.prefixes(first, second, min(rows, remaining) - 2)

    def second_pass(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        """The trees of both drafts."""
        found = zip(drafts, self.second(states, drafts, counts), strict=True)
        return [
            Proposal(self._growth.tree(first, second))
            if (first := draft.choices) and second
            else draft
            for draft, second in found
        ]

    def second(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[dict[Path, Choices]]:
        """For each sequence what the second drafter offers after each of so many prefixes.

        On a third level after prefixes of these as well.
        """
        chosen = [list(draft.branches)[:n] for draft, n in zip(drafts, counts, strict=True)]
        known = [dict[Path, Choices]() for _ in drafts]
        for level in range(self._levels - 1):
            if level:
                chosen = [
                    [*legal(self._prefixes(draft.choices, second, draft.remaining), state)]
                    if draft.choices and second
                    else []
                    for draft, second, state in zip(drafts, known, states, strict=True)
                ]
            asked = [i for i, prefixes in enumerate(chosen) if prefixes]
            asks = [self._ask(states[i], drafts[i], chosen[i]) for i in asked]
            for i, found in zip(asked, self._ends[1].choices(asks, TOP_K), strict=True):
                known[i] |= zip(chosen[i], found, strict=True)
        return known

    def _ask(self, state: State, draft: FirstDraft, prefixes: list[Path]) -> Ask:
        rows = min(self._sizes[1], draft.remaining)
        return Ask(contexts_of(state)[-1], state.anchor, rows, prefixes)


def _make(pair: Pair, config: DecodeConfig) -> Drafter:
    models, branches = block_models(pair), config.branches or BRANCHES
    first, second = models[0], models[1] if len(models) > 1 else None
    if config.growth != "joint":
        if config.budget is not None:
            what = f"growth={config.growth} never cuts its tree, but the budget is {config.budget}"
            raise DFlashError(what, "leave the budget or the growth out", "budget")
        growth = PaperGrowth(branches, apart=config.growth == "apart")
        return DualDiffusion(first, second, config, growth)
    both = DualDiffusion(first, second, config, JointGrowth(branches, config.budget or MOST_NODES))
    if config.budget is not None:
        return both
    return within_budget(both, {"draft": both}, pair, config, METHOD.sources)


METHOD = Method(
    "d2sd",
    "DFlash + variable-prefix",
    _make,
    lone_label="DFlash, continuing itself",
    family=checkpoint.FAMILY,
    files=checkpoint,
    best_with=2,
    needs_trees=True,
    settings=(
        "block_size",
        "second_block_size",
        "levels",
        "extension",
        "branches",
        "growth",
        "budget",
        "lookup",
        "recalibrate",
    ),
    sources=(DRAFT, SECOND_DRAFT, LOOKUP),
    preference=4,
)
