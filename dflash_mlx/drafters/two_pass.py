"""Drafters that can stop behind their first pass, so that others say whether a second pays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dflash_mlx.drafters.growth.grow import Choices, Path
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.state import State


@dataclass(frozen=True)
class FirstDraft(Proposal):
    """The tree of a first pass, and what a second one could continue.

    room: nodes that a path may have. choices: what the pass offers behind each path, None where it
    was not made for want of room. branches: prefixes in the order in which they would be continued,
    with the posterior of being accepted exactly so far.
    """

    room: int = 1
    choices: Choices | None = None
    branches: Mapping[Path, float] = field(default_factory=dict)


class TwoPass(EachAlone):
    """A drafter that makes both passes, or goes on behind the first only where it is asked to."""

    def draft(self, state: State, room: int) -> Proposal:
        """As `draft_all`, for one sequence."""
        return self.draft_all([state], [room])[0]

    def draft_all(self, states: Sequence[State], rooms: Sequence[int]) -> list[Proposal]:
        """The trees of both passes, no deeper than `rooms` allow."""
        drafts = self.begin(states, rooms)
        return self.go_on(states, drafts, [len(draft.branches) for draft in drafts])

    @abstractmethod
    def begin(self, states: Sequence[State], rooms: Sequence[int]) -> list[FirstDraft]:
        """The first pass over all sequences."""

    @abstractmethod
    def go_on(
        self, states: Sequence[State], drafts: Sequence[FirstDraft], counts: Sequence[int]
    ) -> list[Proposal]:
        """The second pass, over the first so many branches of each draft; without any it stays."""
