"""D2SD: two block-diffusion drafters, one prefix tree (arXiv 2606.04446)."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.adaptive import MOST_NODES, within_budget
from dflash_mlx.drafters.best_first import BestFirst
from dflash_mlx.drafters.dflash import checkpoint
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.context import DualContext, FeatureContext
from dflash_mlx.drafters.growth.grow import (
    FIRST,
    SECOND,
    Path,
    Ranked,
    best_first,
    follow_nearest,
    likely_boundaries,
    likely_prefixes,
    mix,
)
from dflash_mlx.drafters.growth.links import along_path
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
from dflash_mlx.engine.drafter import Drafter, EachAlone, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State


class PaperGrowth:
    """As published: K continuations of the first draft where it is likely to be rejected.

    branches: K. Nothing is pruned; equal prefixes share their nodes.
    """

    def __init__(self, branches: int) -> None:
        self._branches = branches

    def prefixes(self, first: Ranked) -> list[Path]:
        """The lengths i with the largest rejection-boundary posterior r(i)."""
        return [first.best[:i] for i in likely_prefixes(first.confidences, self._branches)]

    def tree(self, first: Ranked, second: Mapping[Path, Ranked]) -> Tree:
        """The first draft and its continuations, merged."""
        known = first.logprobs[:, 0].tolist()
        chains = [(first.best, known, FIRST)]
        for prefix, ranked in second.items():
            behind = ranked.logprobs[:, 0].tolist()
            chains.append(((*prefix, *ranked.best), [*known[: len(prefix)], *behind], SECOND))
        return Tree.of_chains(chains)


class JointGrowth:
    """Best-first over the distributions of both drafters.

    branches: K prefixes, of any likely path through the first draft's choices. nodes: of the tree,
    the root included. The first draft keeps a share in what the second says behind a prefix: the
    second knows the prefix, but two drafters err in different places.
    """

    ROOT_SHARE = 0.5  # of the second drafter where neither sees more than the anchor
    FIRST_SHARE = 0.3  # of the first drafter behind a prefix; 0.15 and 0.3 are alike

    def __init__(self, branches: int, nodes: int) -> None:
        self._branches, self._nodes = branches, nodes

    def prefixes(self, first: Ranked) -> list[Path]:
        """The paths after which a rejection is likeliest, the empty one among them."""
        paths = likely_boundaries(first, self._branches)
        return paths if () in paths else [(), *paths[: self._branches - 1]]

    def tree(self, first: Ranked, second: Mapping[Path, Ranked]) -> Tree:
        """The likeliest prefixes, each token as the best informed drafts see it."""
        drafts: dict[Path, Ranked] = {(): mix(first, second[()], self.ROOT_SHARE)}
        for prefix, ranked in second.items():
            if prefix:
                drafts[prefix] = mix(ranked, first.after(len(prefix)), self.FIRST_SHARE)
        return best_first(follow_nearest(drafts), self._nodes, second)


Growth = PaperGrowth | JointGrowth  # how two drafts become one tree


class DualDiffusion(EachAlone):
    """First draft, K second drafts in one pass over one shared context, one tree.

    second: the variable-prefix drafter; None lets the first drafter continue its own prefixes (the
    paper's ablation). Raises DFlashError for a block size that either was not trained for.
    """

    name = "d2sd"
    rounds_ahead = 0

    def __init__(
        self, first: BlockModel, second: BlockModel | None, block_size: int | None, growth: Growth
    ) -> None:
        self._models = (first,) if second is None else (first, second)
        for model in self._models:
            check_block_size(block_size, model.block_size)
        self.block_size = block_size or min(model.block_size for model in self._models)
        self.taps = tuple(sorted({tap for model in self._models for tap in model.taps}))
        self._growth = growth

    def new_context(self) -> DualContext:
        """Empty contexts for one sequence; a lone drafter needs only one."""
        columns = tuple(tuple(self.taps.index(tap) for tap in model.taps) for model in self._models)
        contexts = tuple(model.new_context() for model in self._models)
        return DualContext(contexts, columns, len(self.taps))

    def draft(self, state: State, room: int) -> Proposal:
        """The tree of both drafts, no deeper than `room` allows."""
        rows = min(self.block_size, room)
        if rows == 1:
            return Proposal(Tree.chain())
        return Proposal(self._growth.tree(*self.drafts(state, rows)))

    def drafts(self, state: State, rows: int) -> tuple[Ranked, dict[Path, Ranked]]:
        """The first draft of a block of `rows`, and the second after each prefix."""
        contexts, models = contexts_of(state), self._models
        (first,) = _ranked(models[0], contexts[0], state.anchor, rows, [()])
        prefixes = self._growth.prefixes(first)
        second = _ranked(models[-1], contexts[-1], state.anchor, rows, prefixes)
        return first, dict(zip(prefixes, second, strict=True))


def _ranked(
    model: BlockModel, context: FeatureContext, anchor: mx.array, rows: int, prefixes: list[Path]
) -> list[Ranked]:
    """The likeliest tokens behind each prefix; of a linked drafter, after the likeliest before."""
    if model.is_linked:
        found = model.linked(context, anchor, rows, prefixes)
        return [along_path(linked, TOP_K) for linked in found]
    whole, parts = model.ranked(context, anchor, rows, TOP_K, prefixes), []
    for prefix in prefixes:
        length = rows - 1 - len(prefix)
        parts.append(Ranked(whole.tokens[:length], whole.logprobs[:length]))
        whole = whole.after(length)
    return parts


def _make(pair: Pair, config: DecodeConfig) -> Drafter:
    models, branches = block_models(pair), config.branches or BRANCHES
    first, second = models[0], models[1] if len(models) > 1 else None
    if config.growth == "paper":
        return DualDiffusion(first, second, config.block_size, PaperGrowth(branches))
    growth = JointGrowth(branches, config.budget or MOST_NODES)
    both = DualDiffusion(first, second, config.block_size, growth)
    if config.budget is not None:
        return both
    alone = BestFirst(first, both.block_size, MOST_NODES)
    drafters: dict[str, Drafter] = {"first draft": alone, "both drafts": both}
    return within_budget(both, drafters, pair, config, METHOD.sources)


METHOD = Method(
    "d2sd",
    "DFlash + variable-prefix",
    _make,
    lone_label="DFlash, continuing itself",
    family=checkpoint.FAMILY,
    files=checkpoint,
    best_with=2,
    needs_trees=True,
    settings=("block_size", "branches", "growth", "budget", "lookup", "recalibrate"),
    sources=(DRAFT, SECOND_DRAFT, LOOKUP),
    preference=4,
)
