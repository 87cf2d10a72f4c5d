"""What the status lines say: figures of one answer, bars, and lines that fit a width."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.client import NO_DRAFTS, DFlashError, Statistics, amount, find_method
from dflash_mlx.client import counted as counted

_ABSURD = 1e15  # no figure of an answer is as large, and figures are multiplied

BARS = "▁▂▃▄▅▆▇█"
SEPARATOR = " · "
_EIGHTHS: tuple[str, ...] = ("", *"▏▎▍▌▋▊▉")
_NEARLY_FULL = 0.8  # share of the context from which it is worth a place among the first figures
_ROOMY = 50  # columns in which bars may have more words beside them
LEAST_RATIO, _MOST_RATIO = 1.05, 100.0  # to plain decoding; nothing real lies beyond the latter
_LEAST_TOKENS = 20  # of an answer, for its speed to be compared
_ENOUGH_PLAIN = 8  # rounds without drafts, for their time to be measured

MEANINGS = {
    "method": "how tokens are drafted, see /method",
    "speed": "tokens of the answer per second of writing it; reading the question is left out",
    "against plain decoding": "plain decoding takes one pass of the large model for every token; "
    "~ marks an estimate from what passes took in this answer",
    "rounds": "passes of the large model; each checks all drafted tokens at once",
    "tokens per round": "accepted drafts and the one token that the large model adds itself; "
    "plain decoding has 1",
    "drafts accepted": "only drafts that are the large model's own choice are accepted, so a bad "
    "draft costs time, never a word",
    "accepted by position": "how often the 1st, 2nd, ... drafted token in a row was accepted",
    "first token after": "from Enter to the first token",
    "reused from earlier turns": "still in memory, so they were not computed again",
    "context in use": "what the model can see at once; /new starts over",
}


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
    if isinstance(value, (int, float)) and not abs(value) < _ABSURD:  # nor is nan
        return False
    kinds = (int, float) if isinstance(empty, float) else type(empty)
    return isinstance(value, kinds) and not isinstance(value, bool)


def bar(share: float) -> str:
    """One character for a share from 0 to 1."""
    level = int(min(max(share, 0.0), 1.0) * (len(BARS) - 1) + 0.5)
    return BARS[level]


def fit(parts: Sequence[str], width: int, separator: str = SEPARATOR) -> str:
    """As many of `parts` as fit in `width`, the first ones first; never more than `width`."""
    line = ""
    for part in parts:
        longer = f"{line}{separator}{part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line or "".join(parts[:1])[:width]


def times_plain(figures: Figures) -> str:
    """How many times as fast as plain decoding, "~" where it is an estimate, "" where unknown."""
    short = figures["generated_tokens"] < _LEAST_TOKENS
    if short or not LEAST_RATIO <= figures["times_plain"] <= _MOST_RATIO:
        return ""
    plain = re.search(r"(\d+) plain", figures["modes"])
    measured = plain is not None and int(plain[1]) >= _ENOUGH_PLAIN
    return f"{'' if measured else '~'}{figures['times_plain']:.1f}"


def speed(tokens_per_second: float) -> str:
    """Three digits at most, as a person reads them."""
    return f"{tokens_per_second:.1f}" if tokens_per_second < 100 else f"{tokens_per_second:.0f}"


def speed_parts(figures: Figures) -> list[str]:
    """The first status line, most important first: "29 tok/s · 2.0x plain", and why."""
    now, ratio = f"{speed(figures['tokens_per_second'])} tok/s", times_plain(figures)
    return [f"{now} · {ratio}x plain" if ratio else now, *gains(figures), *pressing(figures)]


def gains(figures: Figures) -> list[str]:
    """Why it is fast: what a round brings, and how good the drafts are."""
    if not figures["accepted_by_position"]:
        told = figures["generated_tokens"] >= _LEAST_TOKENS
        return [_no_drafts(figures)] if told and figures["method"] != NO_DRAFTS else []
    accepted = f"{figures['acceptance_rate']:.0%} of drafts accepted"
    return [f"{figures['mean_accepted']:.1f} tokens per round", accepted]


def _no_drafts(figures: Figures) -> str:
    """Why nothing was guessed: a budget chose so, or the method found nothing to guess."""
    chosen = re.fullmatch(r"\d+ plain", figures["modes"])
    return "plain decoding: drafts do not pay here" if chosen else "plain decoding: no drafts found"


def pressing(figures: Figures) -> list[str]:
    """The length of the answer; where the context is nearly full, that instead."""
    full = _context(figures) / (figures["context_length"] or math.inf)
    if full > _NEARLY_FULL:
        return [f"context {full:.0%} full"]
    return [counted(figures["generated_tokens"], "token")]


def bars(figures: Figures, width: int) -> list[str]:
    """This answer's speed above that of plain decoding, as bars on one scale; [] where unknown."""
    ratio, now = times_plain(figures), figures["tokens_per_second"]
    if not ratio:
        return []
    slow, mark = now / figures["times_plain"], "~" if ratio.startswith("~") else ""
    ground = (" estimated" if mark else " measured") if width >= _ROOMY else ""
    plain = ("plain decoding", slow, f"{mark}{speed(slow)} tok/s{ground}")
    rows, most = (("with drafts", now, f"{speed(now)} tok/s"), plain), max(now, slow) or 1
    room = width - len(plain[0]) - 2 - len(f"~999.9 tok/s{ground}")
    return [f"{name:<14} {wide_bar(value / most, room)} {told}" for name, value, told in rows]


def wide_bar(share: float, width: int) -> str:
    """A bar of up to `width` characters for a share from 0 to 1, to an eighth of one."""
    whole, rest = divmod(round(min(max(share, 0.0), 1.0) * max(width, 0) * 8), 8)
    return "█" * whole + _EIGHTHS[rest]


def speed_line(speeds: Sequence[float]) -> str:
    """Speed over the answer as bars, with its scale; "" before there is any."""
    if not speeds:
        return ""
    most = max(speeds)
    shown = "".join(bar(value / (most or 1)) for value in speeds)
    return f"speed {shown} up to {speed(most)} tok/s"


def position_parts(figures: Figures) -> list[str]:
    """How often drafts were accepted at each position, as bars from 0 to 1 with their numbers."""
    shares = figures["accepted_by_position"]
    parts = [f"{i} {bar(share)} {share:.0%}" for i, share in enumerate(shares, start=1)]
    return [f"accepted by position  {parts[0]}", *parts[1:]] if parts else []


def statistics_rows(figures: Figures) -> list[tuple[str, str]]:
    """Everything about one answer: what is counted, and how much it is."""
    return [
        ("method", _method(figures["method"])),
        ("speed", f"{figures['tokens_per_second']:.2f} tokens per second"),
        ("against plain decoding", _against_plain(figures)),
        ("tokens of the answer", str(figures["generated_tokens"])),
        ("rounds", f"{figures['rounds']} ({figures['modes']})".removesuffix(" ()")),
        ("tokens per round", f"{figures['mean_accepted']:.2f}"),
        ("drafts accepted", f"{figures['acceptance_rate']:.1%}"),
        ("accepted by position", _positions(figures)),
        ("first token after", f"{figures['time_to_first_token']:.3f} s"),
        ("tokens of the prompt", str(figures["prompt_tokens"])),
        ("reused from earlier turns", str(figures["reused_tokens"])),
        ("reading the prompt", f"{figures['prefill_seconds']:.3f} s"),
        ("writing the answer", f"{figures['decode_seconds']:.3f} s"),
        ("context in use", f"{_context(figures)} of {figures['context_length']} tokens"),
        ("most memory in use", amount(figures["peak_memory_bytes"])),
    ]


def _method(name: str) -> str:
    """For people and as in /method; of a file from elsewhere, whatever it says."""
    try:
        return f"{find_method(name).label} ({name})"
    except DFlashError:
        return name


def _against_plain(figures: Figures) -> str:
    if figures["method"] == NO_DRAFTS:
        return "it is plain decoding"
    if not figures["accepted_by_position"]:
        return _no_drafts(figures)
    ratio, enough = figures["times_plain"], figures["generated_tokens"] >= _LEAST_TOKENS
    if enough and 0.05 < ratio < LEAST_RATIO:
        told = "about as fast" if ratio > 0.95 else "slower"
        return f"{told}, by what passes took in this answer; /race compares"
    if not times_plain(figures):
        return "not known, /race compares"
    plain = figures["tokens_per_second"] / figures["times_plain"]
    return f"{times_plain(figures)} times as fast as {plain:.1f} tokens per second"


def _context(figures: Figures) -> int:
    return int(figures["prompt_tokens"] + figures["generated_tokens"])


def _positions(figures: Figures) -> str:
    """Up to the last position at which anything was accepted."""
    shares = figures["accepted_by_position"]
    deepest = max((i for i, share in enumerate(shares, start=1) if share), default=1)
    return " ".join(f"{share:.0%}" for share in shares[:deepest]) or "nothing drafted"
