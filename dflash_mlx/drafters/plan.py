"""What a method drafts with given settings, drawn, chain or tree: decided here alone."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.budget import MOST_NODES, within_budget
from dflash_mlx.drafters.method import Method
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Pair


@dataclass(frozen=True)
class Plan:
    """What a method drafts for a pair, and whether all of it is verified or as much as pays."""

    method: Method
    pair: Pair
    config: DecodeConfig
    drawn: bool  # a chain for rejection sampling
    chain: bool  # a tree otherwise
    fixed: bool  # whether all of it is verified

    @property
    def nodes(self) -> int:
        """The most nodes of a tree, its root included."""
        return self.config.budget or MOST_NODES

    def follow(self, drafter: Drafter) -> Drafter:
        """The drafter itself, or as much of its drafts as pays in each round."""
        if self.fixed:
            return drafter
        method, drafters = self.method, {"draft": drafter}
        only_chains = self.drawn or not (method.has_budget or method.needs_trees)
        sources = method.sources
        return within_budget(drafter, drafters, self.pair, self.config, sources, only_chains)


def plan(method: Method, pair: Pair, config: DecodeConfig, branches: int | None = None) -> Plan:
    """The plan for these settings; branches: that were asked for, of a method that may do without.

    Raises DFlashError where a tree is asked for that cannot be verified.
    """
    size, rejects = config.block_size, config.acceptance == "reject" and config.draws_drafts
    asked = {"budget": config.budget, "branches": branches} if method.has_budget else {}
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if method.draws and rejects:
            what = f"{name} is {value}, but acceptance is reject, which keeps chains alone"
            raise DFlashError(what, "leave one of them out", name)
    if asked:
        pair.target.check_trees()
    trees = pair.target.takes_trees and method.has_budget
    chain = not method.needs_trees and (not trees or (size is not None and not asked))
    drawn = method.draws and config.draws_drafts and (chain or rejects)
    sized = size is not None and not method.needs_trees
    return Plan(method, pair, config, drawn, chain, fixed=sized or "budget" in asked)
