"""What every drafter offers to the decode loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx

from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.engine.state import Context, State


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes for one sequence."""

    tree: Tree
    # [N - 1, V] what each token of a chain was drawn from, for rejection sampling; None for best
    # guesses. A row may depend on the tokens drawn before it.
    q: mx.array | None = None
    why: Callable[[], str] | None = None  # this tree and no other; None where nothing chooses
    # What a round of plain decoding would take now instead; None where nobody knows.
    plain_seconds: float | None = None
    # Of a draft made step by step: behind which chance to be right each further step was made.
    steps: tuple[float, ...] = ()
    forced: bool = False  # by the grammar, which leaves no choice; no drafter was asked

    def part(self, nodes: Sequence[int]) -> Proposal:
        """Only these nodes, in order and closed under parents; of a chain its first ones."""
        q = None if self.q is None else self.q[: len(nodes) - 1]
        return replace(self, tree=self.tree.prune(nodes), q=q)

    @property
    def mode(self) -> str:
        """What was chosen, "plain", "chain" or "tree"; "" where nothing chooses."""
        if self.why is None or self.forced:
            return ""
        return "plain" if len(self.tree) == 1 else "chain" if self.tree.is_chain else "tree"

    @property
    def reason(self) -> str:
        return "" if self.why is None else self.why()


@dataclass(frozen=True)
class Round:
    """What was proposed for one sequence, and what the target accepted of it."""

    proposal: Proposal
    accepted: Accepted


@dataclass(frozen=True)
class Reason:
    """Why a round was spent as it was, in words when it is called."""

    drafted: bool  # a draft model was run
    checked: bool  # drafted tokens are verified
    tried: bool  # only to see what it is worth by now
    rates: tuple[tuple[str, float], ...]  # expected tokens per second of all choices, best first
    continued: bool = False  # a second pass followed the first

    def __call__(self) -> str:
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in self.rates)
        more = "A second draft continued the first where it may fail. " if self.continued else ""
        return f"{self._choice()} {more}Expected of such rounds, in tokens per second: {rates}."

    def _choice(self) -> str:
        if self.tried and self.drafted:
            return "A draft is tried again, because it may pay by now."
        if self.tried:
            return "Plain decoding is tried again, because it may pay by now."
        if self.checked:
            more = "one more would cost more time than it is likely to save"
            return f"As many drafted tokens are checked as pay; {more}."
        if self.drafted:
            return "Nothing that was drafted was likely enough to be worth checking."
        return "Nothing was drafted, because that does not pay at the moment."


class Drafter(Protocol):
    """Proposes trees; what it remembers of a sequence's tokens is in the context."""

    name: str  # as in `--method`
    aux_layers: tuple[int, ...]  # target layers whose output it reads

    @property
    def rounds_ahead(self) -> int:
        """Rounds that may start unread; 0 where the next tree depends on the tokens of this one."""

    def new_context(self) -> Context:
        """An empty context for one sequence."""

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        """A tree for each sequence, behind its anchor.

        The paths of a tree have at most `state.remaining` nodes. budget: rows that all trees may
        have together, at least one for each.
        """


def columns_of(
    features: mx.array | None, aux_layers: tuple[int, ...], wanted: tuple[int, ...]
) -> mx.array | None:
    """Of features [N, m*d] of `aux_layers` the columns of the layers that one drafter reads."""
    if features is None or wanted == aux_layers:
        return features
    if not wanted:
        return None
    layers = mx.split(features, len(aux_layers), axis=-1)
    return mx.concatenate([layers[aux_layers.index(layer)] for layer in wanted], axis=-1)


def allowed(proposal: Proposal, state: State) -> Proposal:
    """Without the nodes that the grammar forbids; a chain that was drawn stays whole, as q asks."""
    if state.constraint is None or proposal.q is not None or len(proposal.tree) == 1:
        return proposal
    return proposal.part(state.constraint.nodes(proposal.tree, state.tokens))


class EachAlone(ABC):
    """A drafter that gives every sequence an equal share of rows."""

    def propose(self, states: Sequence[State], budget: int) -> list[Proposal]:
        share = budget // len(states)
        drafts = self.draft_all(states, [min(state.remaining, share) for state in states])
        cut = [  # what is cut is matched: its q may be another's
            draft if len(draft.tree) <= share else replace(draft.part(range(share)), q=None)
            for draft in drafts
        ]
        return [allowed(draft, state) for draft, state in zip(cut, states, strict=True)]

    def draft_all(self, states: Sequence[State], rooms: Sequence[int]) -> list[Proposal]:
        """As `draft`, one after the other; or all at once, by drafters that can."""
        return [self.draft(state, rows) for state, rows in zip(states, rooms, strict=True)]

    @abstractmethod
    def draft(self, state: State, remaining: int) -> Proposal:
        """A tree whose paths have 1 to `remaining` nodes, the root included."""
