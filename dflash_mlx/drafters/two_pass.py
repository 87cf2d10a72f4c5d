"""Drafters that can stop behind their first pass, so that others say whether a second pays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dflash_mlx.drafters.growth.grow import Choices, Path
from dflash_mlx.engine.drafter import EachAlone, Proposal, allowed
from dflash_mlx.engine.state import State


@dataclass(frozen=True)
class FirstDraft(Proposal):
    """The tree of a first pass, and what a second one could continue."""

    remaining: int = 1  # nodes that a path may have
    choices: Choices | None = None  # behind each path; None where no pass was made
    # Prefixes that could be continued, likeliest first, with the posterior of being accepted
    # exactly so far.
    branches: Mapping[Path, float] = field(default_factory=dict)


class TwoPass(EachAlone):
    """A drafter that makes both passes, or goes on behind the first only where it is asked to."""

    def draft(self, state: State, remaining: int) -> Proposal:
        return self.draft_all([state], [remaining])[0]

    def draft_all(self, states: Sequence[State], rooms: Sequence[int]) -> list[Proposal]:
        drafts = self.begin(states, rooms)
        return self.second_pass(states, drafts, [len(draft.branches) for draft in drafts])

    def begin(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        """The first pass over all sequences, without what their grammars forbid."""
        return [
            replace(draft, tree=allowed(draft, state).tree, branches=legal(draft.branches, state))
            for draft, state in zip(self.first_pass(states, rooms), states, strict=True)
        ]

    def go_on(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        """The second pass over the first so many branches of each draft; without any it stays."""
        found = zip(self.second_pass(states, drafts, counts), states, strict=True)
        return [allowed(proposal, state) for proposal, state in found]

    @abstractmethod
    def first_pass(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        """The first pass, whatever grammars say."""

    @abstractmethod
    def second_pass(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        """The second pass, whatever grammars say."""


def legal(branches: Mapping[Path, float], state: State) -> Mapping[Path, float]:
    """Those that the grammar of an answer does not forbid; their posteriors are as without it."""
    if (constraint := state.constraint) is None:
        return branches
    return {
        prefix: posterior
        for prefix, posterior in branches.items()
        if constraint.run(state.tokens, prefix) == len(prefix)
    }
