"""SpecDiff among the methods: chains, trees or samples, whatever was asked for or pays."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.budget import MOST_NODES, within_budget
from dflash_mlx.drafters.growth.grow import Ranked, best_first, follow
from dflash_mlx.drafters.growth.rank import TOP_K
from dflash_mlx.drafters.growth.reliability import Sizes, reach
from dflash_mlx.drafters.growth.samples import merge_samples
from dflash_mlx.drafters.method import DRAFT, LOOKUP, Method, asks_for_tree
from dflash_mlx.drafters.specdiff import checkpoint
from dflash_mlx.drafters.specdiff.drafter import Denoising, DrawnSpecDiff, SpecDiff
from dflash_mlx.drafters.specdiff.model import FAMILY, MaskedModel
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Pair

SAMPLED_FROM = 64  # likeliest tokens of a position (SpecDiff-2, arXiv 2511.00606)


def likeliest(ranked: Ranked, position: int, nodes: int) -> Tree:
    """The `nodes` likeliest prefixes; position: unused, see `Grow`."""
    return best_first(follow(ranked), nodes)


def sampled(ranked: Ranked, position: int, samples: int, seed: int, nodes: int) -> Tree:
    """The likeliest block and `samples` draws, merged (SpecDiff-2, arXiv 2511.00606).

    Of more than `nodes`, those that are likeliest to be reached.
    """
    generator = np.random.default_rng((seed, position))
    tree = merge_samples(ranked.logprobs, samples, generator, ranked.tokens)
    chances = np.exp(np.minimum(tree.logprobs, 0.0))  # rounding may leave one above 1
    return tree.prune(sorted(Sizes.of_trees([reach(tree, chances)], nodes).ends.tolist()))


def _make(pair: Pair, config: DecodeConfig) -> Drafter:
    model = cast(MaskedModel, pair.of(FAMILY)[0])
    how, size = Denoising(config.steps or 1, config.schedule), config.block_size
    grows = asks_for_tree(config)
    if grows:
        pair.target.check_trees()
    chain = not pair.target.takes_trees or (size is not None and not grows)
    drafter: SpecDiff
    if how.in_order and config.draws_drafts and (chain or config.acceptance == "reject"):
        drafter = DrawnSpecDiff(model, size, how, config.sampling, weighed=size is None)
    elif config.branches is not None:
        seed, most = config.sampling.with_seed().seed or 0, config.budget or MOST_NODES
        grow = partial(sampled, samples=config.branches, seed=seed, nodes=most)
        drafter = SpecDiff(model, size, how, grow, SAMPLED_FROM)
    else:
        nodes = model.block_size if chain else config.budget or MOST_NODES
        grow = partial(likeliest, nodes=nodes)
        drafter = SpecDiff(model, size, how, grow, 1 if chain else TOP_K)
    if size is not None or config.budget is not None:
        return drafter
    return within_budget(drafter, {"draft": drafter}, pair, config, METHOD.sources)


METHOD = Method(
    "specdiff",
    "SpecDiff",
    _make,
    family=FAMILY,
    files=checkpoint,
    best_with=1,
    draws=True,
    settings=(
        "block_size", "budget", "branches", "steps", "schedule", "acceptance", "lookup",
        "recalibrate",
    ),
    sources=(DRAFT, LOOKUP),
    preference=1,
)  # fmt: skip
