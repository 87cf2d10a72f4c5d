"""What one answer cost and gained, and watching a decode without changing it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from dflash_mlx.core.tree import Accepted, NearTies

_TOLD = (
    *("prompt_tokens", "reused_tokens", "generated_tokens", "method", "prefill_seconds"),
    *("time_to_first_token", "decode_seconds", "tokens_per_second", "times_plain", "rounds"),
    *("acceptance_length", "mean_accepted", "acceptance_rate", "accepted_by_position"),
)


@dataclass
class Statistics:
    """Counts and seconds of one answer; derived numbers are properties."""

    method: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0  # with a stop token, without what is cut off behind a stop
    rounds: int = 0  # passes of the target; the prompt's, which gives the first token, is none
    prefill_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    drafted: Counter[int] = field(default_factory=Counter)  # tokens by their place in the block
    accepted: Counter[int] = field(default_factory=Counter)  # the same of those that were right
    modes: Counter[str] = field(default_factory=Counter)  # rounds by `Proposal.mode`
    # Of plain decoding for the same tokens, by what passes took meanwhile; 0 where nothing tells.
    plain_seconds: float = 0.0
    near_ties: NearTies | None = None  # what `--exact` took, None without it

    def add_round(self, accepted: Accepted, mode: str = "") -> None:
        self.rounds += 1
        self.drafted.update(set(accepted.tree.depths) - {0})
        self.accepted.update(range(1, len(accepted.path)))
        if mode:
            self.modes[mode] += 1
        if accepted.near_ties is not None:
            self.near_ties = (self.near_ties or NearTies()) + accepted.near_ties

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the prompt, whose pass gives the first token, and that token left out."""
        further = max(0, self.generated_tokens - 1)
        return further / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def times_plain(self) -> float:
        """How many times as fast as plain decoding; 0 where nothing tells.

        An estimate, unless enough of the rounds ("plain" among `modes`) were plain ones.
        """
        return self.plain_seconds / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included; the prompt's own pass left out."""
        return (self.generated_tokens - 1) / self.rounds if self.rounds else 0.0

    mean_accepted = acceptance_length  # its older name

    @property
    def acceptance_rate(self) -> float:
        drafted = self.drafted.total()
        return self.accepted.total() / drafted if drafted else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of drafted tokens accepted at block positions 1, 2, ..."""
        return [self.accepted[k] / self.drafted[k] for k in sorted(self.drafted)]

    def as_dict(self) -> dict[str, Any]:
        near_ties = asdict(self.near_ties or NearTies())
        return {
            **{name: getattr(self, name) for name in _TOLD},
            "modes": dict(self.modes),
            **{f"guard_{name}": number for name, number in near_ties.items()},
            "peak_memory_bytes": mx.get_peak_memory(),
        }


class Observer:
    """Does nothing; the default. Subclasses must not touch what they are shown."""

    def start(self) -> None:
        """Decoding begins."""

    def mark(self, term: str) -> None:
        """The time since the last mark went into `term` of a round."""

    def fell_back(self, error: Exception) -> None:
        """What failed for several sequences together is done for one after the other."""

    def prefilled(self, tokens: int, total: int) -> None:
        """`tokens` of the `total` prompt tokens are in the caches."""


class RoundTimer(Observer):
    """Adds up the seconds that rounds spend in "draft", "verify" and "commit"."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, term: str) -> None:
        now = time.perf_counter()
        self.seconds[term] += now - self._last
        self._last = now
