"""The lines under the conversation: figures of the answer, and progress of what takes long."""

from __future__ import annotations

import re
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Digits, ProgressBar, Static

from dflash_chat.figures import (
    MEANINGS,
    Figures,
    bars,
    figures_of,
    fit,
    gains,
    position_parts,
    pressing,
    speed,
    speed_line,
    speed_parts,
    times_plain,
)
from dflash_chat.speeds import Speeds
from dflash_mlx.client import Delta, Statistics

_DIGITS = 36  # columns that these take with their units
_PERCENT = re.compile(r"^(?P<what>[^:%]*?):?\s*(?P<percent>\d{1,3})%\|")
_AMOUNT = re.compile(r"(?P<done>[\d.]+)\s*/\s*(?P<total>[\d.]+)\s*(?P<unit>[kKMG]?B)")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Progress:
    """Something that takes a while. share: from 0 to 1, None where it is not known."""

    what: str
    share: float | None = None


def read_progress(output: str) -> Progress | None:
    """The newest progress in what tqdm or pip wrote to a terminal; None where there is no text."""
    lines = [line.strip() for line in re.split(r"[\r\n]", _ESCAPES.sub("", output))]
    line = next((line for line in reversed(lines) if line), None)
    if line is None:
        return None
    if found := _PERCENT.match(line):
        return Progress(found["what"] or "loading", min(int(found["percent"]), 100) / 100)
    if found := _AMOUNT.search(line):
        done, total = float(found["done"]), float(found["total"])
        what = f"downloading, {total:g} {found['unit']}"
        return Progress(what, min(done / total, 1.0) if total else None)
    return Progress(line)


class Status(Vertical):
    """The figures that matter, large where there is room; above them a bar while something loads.

    The style sheet says where there is room for large digits; F3 has all figures.
    """

    def __init__(self) -> None:
        super().__init__(id="status")
        self._speeds = Speeds()
        self._statistics: Statistics | None = None
        self._context_length = 0
        self._stored: Figures | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="progress"):
            yield Static(id="what", markup=False)
            yield ProgressBar(total=1.0, show_eta=False, id="bar")
        with Horizontal(id="large"):
            yield Digits(id="speed-digits").with_tooltip(MEANINGS["speed"])
            yield Static("tok/s", id="speed-unit", markup=False)
            yield Digits(id="ratio-digits").with_tooltip(MEANINGS["against plain decoding"])
            yield Static(id="ratio-unit", markup=False)
            yield Static(id="beside", markup=False).with_tooltip(MEANINGS["tokens per round"])
        yield Static(id="speed", markup=False).with_tooltip(MEANINGS["tokens per round"])
        yield Static(id="rounds", markup=False).with_tooltip(MEANINGS["accepted by position"])

    def on_mount(self) -> None:
        self.progress(None)

    def on_resize(self) -> None:
        self.draw()

    @property
    def figures(self) -> Figures | None:
        """Of the answer that is shown, as they are now; None without one.

        The worker goes on counting meanwhile: a round may be half in them until the next look.
        """
        if self._statistics is None:
            return self._stored
        return figures_of(self._statistics, self._context_length)

    def take(self, delta: Delta, context_length: int) -> None:
        """One more round; shown by the next `draw`."""
        self._statistics, self._context_length = delta.statistics, context_length
        self._speeds.add(delta.statistics.decode_seconds, delta.statistics.generated_tokens)

    def show(self, stored: Figures) -> None:
        self._stored = stored
        self.draw()

    def draw(self) -> None:
        """Show the newest figures, as many as fit."""
        figures = self.figures
        if figures is None or not self.is_mounted:
            return
        width = max(self.size.width, 10)
        self.add_class("filled")
        self._draw_large(figures, width)
        self.query_one("#speed", Static).update(fit(speed_parts(figures), width))
        self.query_one("#rounds", Static).update(self._curves(figures, width))

    def _draw_large(self, figures: Figures, width: int) -> None:
        """The two figures that everybody asks for as large digits, and why beside them."""
        ratio = times_plain(figures)
        self.query_one("#speed-digits", Digits).update(speed(figures["tokens_per_second"]))
        self.query_one("#ratio-digits", Digits).update(ratio)
        self.query_one("#ratio-unit", Static).update("x plain" if ratio else "")
        why = fit([*gains(figures), *pressing(figures)], width - _DIGITS)
        both = zip(bars(figures, width - _DIGITS), ("$text-primary", "$secondary"), strict=False)
        lines = [Content.assemble(line) for line in both]
        self.query_one("#beside", Static).update(Content("\n").join([*lines, Content(why)]))

    def _curves(self, figures: Figures, width: int) -> str:
        """Speed over time, and acceptance by position: the speed takes what is left, 8 to 32."""
        frame = len("speed  up to 999.9 tok/s    ")
        places = fit(position_parts(figures), max(width - frame - 8, 8), "  ")
        speeds = self._speeds.over_time(min(32, max(8, width - frame - len(places))))
        return fit([part for part in (speed_line(speeds), places) if part], width, "    ")

    def clear(self) -> None:
        """No answer to show figures of, or not yet."""
        self._statistics = self._stored = None
        self._speeds = Speeds()
        self.remove_class("filled")

    def progress(self, progress: Progress | None) -> None:
        """Show what is under way, None for nothing."""
        self.query_one("#progress").display = progress is not None
        if progress is not None:
            self.query_one("#what", Static).update(progress.what)
            self.query_one("#bar", ProgressBar).update(total=1.0, progress=progress.share or 0.0)
            self.query_one("#bar").display = progress.share is not None
