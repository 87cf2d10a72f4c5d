"""What the status lines say: figures of one answer, bars, and lines that fit a width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx import NO_DRAFTS, Statistics

BARS = "▁▂▃▄▅▆▇█"
SEPARATOR = " | "
GIGABYTE = 10**9


Figures = Mapping[str, Any]  # of one answer, by name: as in `Statistics.as_dict`, and a few more


def figures_of(statistics: Statistics, context_length: int) -> dict[str, Any]:
    """What an answer took so far; context_length: the most tokens that the model can hold.

    modes: rounds by the mode that a budget chose, in words.
    """
    modes = ", ".join(f"{count} {mode}" for mode, count in statistics.modes.most_common())
    return {**statistics.as_dict(), "modes": modes, "context_length": context_length}


def read_figures(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Figures from a file; what is missing there or of another type is nothing of its type."""
    nothing = {name: type(value)() for name, value in figures_of(Statistics(""), 0).items()}
    return {
        name: stored[name] if _same_kind(stored.get(name), empty) else empty
        for name, empty in nothing.items()
    }


def _same_kind(value: Any, empty: Any) -> bool:
    if isinstance(empty, list):
        return isinstance(value, list) and all(_same_kind(v, 0.0) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    kinds = (int, float) if isinstance(empty, float) else type(empty)
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


def speed_parts(figures: Figures) -> list[str]:
    """The first status line, most important first."""
    parts = [f"{figures['tokens_per_second']:.1f} tok/s"]
    if figures["times_plain"]:
        parts.append(f"{times_plain(figures)}x plain")
    if figures["accepted_by_position"]:
        parts.append(f"{figures['mean_accepted']:.2f} tokens/round")
        parts.append(f"accepted {figures['acceptance_rate']:.0%}")
    parts.append(f"first after {figures['time_to_first_token']:.2f} s")
    parts.append(f"memory {gigabytes(figures['peak_memory_bytes'])}")
    return parts


def times_plain(figures: Figures) -> str:
    """How many times as fast as plain decoding, "~" where no round of this answer was plain."""
    return f"{'' if 'plain' in figures['modes'] else '~'}{figures['times_plain']:.2f}"


def context_parts(figures: Figures) -> list[str]:
    """What the answer took of the context, and how much of the prompt was computed for it."""
    prompt = figures["prompt_tokens"]
    return [
        f"ctx {_context(figures)}/{figures['context_length']}",
        f"prefilled {prompt - figures['reused_tokens']} of {prompt}",
    ]


def round_parts(figures: Figures, rounds: Sequence[int], width: int) -> list[str]:
    """The second status line; the sparkline takes what the others leave, 8 to 32 columns."""
    position = histogram(figures["accepted_by_position"])
    parts = [f"by position {position}"] if position else []
    parts += context_parts(figures)
    taken = sum(len(part) + len(SEPARATOR) for part in parts) + len("per round ")
    if rounds:
        parts.insert(0, f"per round {sparkline(rounds, min(32, max(8, width - taken)))}")
    return parts


def gigabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIGABYTE:.2f} GB"


def statistics_rows(figures: Figures) -> list[tuple[str, str]]:
    """Everything about one answer: what is counted, and how much it is."""
    return [
        ("method", figures["method"]),
        ("tokens per second, decoding", f"{figures['tokens_per_second']:.2f}"),
        ("against plain decoding", _against_plain(figures)),
        ("tokens generated", str(figures["generated_tokens"])),
        ("rounds", f"{figures['rounds']} ({figures['modes']})".removesuffix(" ()")),
        ("tokens per round", f"{figures['mean_accepted']:.2f}"),
        ("drafted tokens accepted", f"{figures['acceptance_rate']:.1%}"),
        ("accepted by position", _positions(figures)),
        ("time to first token", f"{figures['time_to_first_token']:.3f} s"),
        ("prompt tokens", str(figures["prompt_tokens"])),
        ("of them from the caches", str(figures["reused_tokens"])),
        ("prefill", f"{figures['prefill_seconds']:.3f} s"),
        ("decoding", f"{figures['decode_seconds']:.3f} s"),
        ("context", f"{_context(figures)} of {figures['context_length']} tokens"),
        ("peak memory", gigabytes(figures["peak_memory_bytes"])),
    ]


def _against_plain(figures: Figures) -> str:
    if figures["method"] == NO_DRAFTS:
        return "it is plain decoding"
    if not figures["times_plain"]:
        return "not known: nothing was decoded plainly"
    plain = figures["tokens_per_second"] / figures["times_plain"]
    return f"{times_plain(figures)} times as fast as {plain:.1f} tok/s"


def _context(figures: Figures) -> int:
    """Tokens of prompt and answer together."""
    return int(figures["prompt_tokens"] + figures["generated_tokens"])


def _positions(figures: Figures) -> str:
    return (
        " ".join(f"{share:.0%}" for share in figures["accepted_by_position"]) or "nothing drafted"
    )
