"""What the status lines say: figures of one answer, bars, and lines that fit a width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dflash_mlx import Statistics

BARS = "▁▂▃▄▅▆▇█"
SEPARATOR = " | "
GIGABYTE = 10**9


@dataclass(frozen=True)
class Figures:
    """A copy of the statistics of an answer so far, safe to hand to another thread.

    context_length: the most tokens the model can hold. modes: rounds by the mode that a budget
    chose, in words. Seconds and bytes as in `Statistics`.
    """

    method: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    mean_accepted: float = 0.0
    acceptance_rate: float = 0.0
    accepted_by_position: tuple[float, ...] = ()
    peak_memory_bytes: int = 0
    context_length: int = 0
    modes: str = ""

    @classmethod
    def of(cls, statistics: Statistics, context_length: int) -> Figures:
        """The figures as they are now."""
        modes = ", ".join(f"{count} {mode}" for mode, count in statistics.modes.most_common())
        counts = {**statistics.as_dict(), "modes": modes, "context_length": context_length}
        return cls.read(counts)

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Figures:
        """From stored figures; what is missing or of another type stays at its default."""
        given = {f.name: stored[f.name] for f in fields(cls) if f.name in stored}
        positions = given.get("accepted_by_position")
        if isinstance(positions, list):
            given["accepted_by_position"] = tuple(positions)
        defaults = {f.name: f.default for f in fields(cls)}
        return cls(**{k: v for k, v in given.items() if _same_kind(v, defaults[k])})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that had to be computed; the others were in the caches."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def context_used(self) -> int:
        """Tokens of prompt and answer together."""
        return self.prompt_tokens + self.generated_tokens


def _same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(_same_kind(v, 0.0) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and not isinstance(value, bool)


def bar(share: float) -> str:
    """One character for a share from 0 to 1."""
    level = int(min(max(share, 0.0), 1.0) * (len(BARS) - 1) + 0.5)
    return BARS[level]


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars between 0 and the largest of them."""
    last = values[-width:] if width > 0 else ()
    peak = max(last, default=0) or 1
    return "".join(bar(value / peak) for value in last)


def histogram(shares: Sequence[float]) -> str:
    """Shares from 0 to 1 as bars, so that two histograms can be compared."""
    return "".join(map(bar, shares))


def fit(parts: Sequence[str], width: int, separator: str = SEPARATOR) -> str:
    """As many of `parts` as fit in `width`, the first ones first; never more than `width`."""
    line = ""
    for part in parts:
        longer = f"{line}{separator}{part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line or "".join(parts[:1])[:width]


def speed_parts(figures: Figures, plain_seconds: float | None) -> list[str]:
    """The first status line, most important first.

    plain_seconds: of one plain token, measured on this machine; None while it is not known.
    """
    parts = [f"{figures.tokens_per_second:.1f} tok/s"]
    if plain_seconds is not None and figures.method != "none":
        parts.append(f"{figures.tokens_per_second * plain_seconds:.2f}x plain")
    if figures.accepted_by_position:
        parts.append(f"{figures.mean_accepted:.2f} tokens/round")
        parts.append(f"accepted {figures.acceptance_rate:.0%}")
    parts.append(f"first after {figures.time_to_first_token:.2f} s")
    parts.append(f"memory {gigabytes(figures.peak_memory_bytes)}")
    return parts


def context_parts(figures: Figures) -> list[str]:
    """What the answer took of the context, and how much of the prompt was computed for it."""
    return [
        f"ctx {figures.context_used}/{figures.context_length}",
        f"prefilled {figures.new_tokens} of {figures.prompt_tokens}",
    ]


def round_parts(figures: Figures, rounds: Sequence[int], width: int) -> list[str]:
    """The second status line; the sparkline takes what the others leave, 8 to 32 columns."""
    position = histogram(figures.accepted_by_position)
    parts = [f"by position {position}"] if position else []
    parts += context_parts(figures)
    taken = sum(len(part) + len(SEPARATOR) for part in parts) + len("per round ")
    if rounds:
        parts.insert(0, f"per round {sparkline(rounds, min(32, max(8, width - taken)))}")
    return parts


def gigabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIGABYTE:.2f} GB"


def statistics_rows(figures: Figures, plain_seconds: float | None) -> list[tuple[str, str]]:
    """Everything about one answer: what is counted, and how much it is."""
    return [
        ("method", figures.method),
        ("tokens per second, decoding", f"{figures.tokens_per_second:.2f}"),
        ("against plain decoding", _against_plain(figures, plain_seconds)),
        ("tokens generated", str(figures.generated_tokens)),
        ("rounds", f"{figures.rounds} ({figures.modes})" if figures.modes else str(figures.rounds)),
        ("tokens per round", f"{figures.mean_accepted:.2f}"),
        ("drafted tokens accepted", f"{figures.acceptance_rate:.1%}"),
        ("accepted by position", _positions(figures)),
        ("time to first token", f"{figures.time_to_first_token:.3f} s"),
        ("prompt tokens", str(figures.prompt_tokens)),
        ("of them from the caches", str(figures.reused_tokens)),
        ("prefill", f"{figures.prefill_seconds:.3f} s"),
        ("decoding", f"{figures.decode_seconds:.3f} s"),
        ("context", f"{figures.context_used} of {figures.context_length} tokens"),
        ("peak memory", gigabytes(figures.peak_memory_bytes)),
    ]


def _against_plain(figures: Figures, plain_seconds: float | None) -> str:
    if plain_seconds is None:
        return "not measured yet"
    ratio = figures.tokens_per_second * plain_seconds
    return f"{ratio:.2f} times as fast ({1 / plain_seconds:.1f} tok/s in plain passes here)"


def _positions(figures: Figures) -> str:
    return " ".join(f"{share:.0%}" for share in figures.accepted_by_position) or "nothing drafted"
