"""What one answer cost and gained."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from dflash_mlx.core.accept import Accepted, NearTies


@dataclass
class Statistics:
    """Counts and seconds of one answer; derived numbers are properties.

    generated_tokens: a stop token included, tokens cut off behind a stop excluded. rounds: passes
    of the target; the first token came with the prompt's, which is none of them.
    drafted, accepted: how often a token was drafted, and accepted, at each position of the block.
    modes: rounds by the mode that a budget chose ("plain", "chain", "tree"), see `Proposal`.
    plain_seconds: what plain decoding would have taken for the same tokens, going by what passes
    took meanwhile; 0 where nothing tells. near_ties: what `--exact` took, None without it.
    """

    method: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    plain_seconds: float = 0.0
    near_ties: NearTies | None = None

    def add_round(self, accepted: Accepted, mode: str = "") -> None:
        """Count a round, and its mode where one was chosen."""
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
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

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

    @property
    def mean_accepted(self) -> float:
        """The older name of `acceptance_length`."""
        return self.acceptance_length

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted positions that were accepted."""
        drafted = self.drafted.total()
        return self.accepted.total() / drafted if drafted else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """The same share for block positions 1, 2, ..."""
        return [self.accepted[k] / self.drafted[k] for k in sorted(self.drafted)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts, seconds, and the derived numbers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "generated_tokens": self.generated_tokens,
            "method": self.method,
            "prefill_seconds": self.prefill_seconds,
            "time_to_first_token": self.time_to_first_token,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": self.tokens_per_second,
            "times_plain": self.times_plain,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "mean_accepted": self.mean_accepted,
            "acceptance_rate": self.acceptance_rate,
            "accepted_by_position": self.accepted_by_position,
            "modes": dict(self.modes),
            **{f"guard_{name}": n for name, n in asdict(self.near_ties or NearTies()).items()},
            "peak_memory_bytes": mx.get_peak_memory(),
        }
