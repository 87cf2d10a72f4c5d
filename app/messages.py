"""What the worker thread tells the screen. Nothing in here holds an array."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_chat.figures import Figures
from dflash_chat.tree_view import DrawnTree, Piece
from dflash_mlx.engine.pair import Means

PLAIN, DRAFTED = "plain", "drafted"


@dataclass(frozen=True)
class ModelInfo:
    """A loaded pair. fallback: what it does for want of a drafter, "" where it has one.

    notes: what loading had to change, a sentence each.
    """

    name: str
    context_length: int
    means: Means
    fallback: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Round:
    """What one round added to the answer.

    text: of the answer, may be empty. pieces: its tokens one by one. finish_reason: as in
    `TextDelta`.
    """

    text: str
    pieces: tuple[Piece, ...]
    tree: DrawnTree
    figures: Figures
    finish_reason: str | None


@dataclass(frozen=True)
class RaceStep:
    """One side of a race moved on. seconds: its own decoding time so far; text: what came new."""

    side: str
    text: str
    tokens: int
    seconds: float
    finished: bool


@dataclass(frozen=True)
class Verdict:
    """How a race ended. text: a sentence. equal: whether every token is the same."""

    text: str
    equal: bool


@dataclass(frozen=True)
class Loaded:
    """A pair is ready."""

    job: int
    info: ModelInfo


@dataclass(frozen=True)
class PlainMeasured:
    """seconds: of a one-row pass, None where this model cannot be measured."""

    job: int
    seconds: float | None


@dataclass(frozen=True)
class Prefilled:
    """So many of the prompt's tokens are in the caches."""

    job: int
    tokens: int
    total: int


@dataclass(frozen=True)
class RoundDone:
    """A round of an answer."""

    job: int
    round: Round


@dataclass(frozen=True)
class Answered:
    """An answer is over. ending: "stop", "length", "context" or "stopped" (by the user)."""

    job: int
    ending: str


@dataclass(frozen=True)
class RaceMoved:
    """A step of a race."""

    job: int
    step: RaceStep


@dataclass(frozen=True)
class RaceDone:
    """The end of a race; verdict is None when the user stopped it."""

    job: int
    verdict: Verdict | None


@dataclass(frozen=True)
class Failed:
    """A request failed. problem: a sentence with the next step."""

    job: int
    problem: str


Event = Loaded | PlainMeasured | Prefilled | RoundDone | Answered | RaceMoved | RaceDone | Failed
