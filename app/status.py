"""The lines under the conversation: figures of the answer, and progress of what takes long."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import ProgressBar, Static

from dflash_chat.figures import Figures, figures_of, fit, round_parts, speed_parts
from dflash_mlx import Statistics, TextDelta

RECENT = 64  # rounds that a sparkline can show
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
    """Two lines of figures, and a third one with a bar while something is under way."""

    def __init__(self) -> None:
        super().__init__(id="status")
        self._rounds: deque[int] = deque(maxlen=RECENT)
        self._statistics: Statistics | None = None
        self._context_length = 0
        self._stored: Figures | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="progress"):
            yield Static(id="what", markup=False)
            yield ProgressBar(total=1.0, show_eta=False, id="bar")
        yield Static(id="speed", markup=False)
        yield Static(id="rounds", markup=False)

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

    def take(self, delta: TextDelta, context_length: int) -> None:
        """One more round; shown by the next `draw`."""
        self._rounds.append(len(delta.tokens))
        self._statistics, self._context_length = delta.statistics, context_length

    def show(self, stored: Figures) -> None:
        """Show the figures of an earlier answer."""
        self._stored = stored
        self.draw()

    def draw(self) -> None:
        """Show the newest figures, as many as fit."""
        figures = self.figures
        if figures is None or not self.is_mounted:
            return
        width = max(self.size.width - 2, 10)
        speed = fit(speed_parts(figures), width)
        rounds = fit(round_parts(figures, tuple(self._rounds), width), width)
        self.query_one("#speed", Static).update(speed)
        self.query_one("#rounds", Static).update(rounds)

    def clear(self) -> None:
        """No answer to show figures of, or not yet."""
        self._statistics = self._stored = None
        self._rounds.clear()
        for name in ("#speed", "#rounds"):
            self.query_one(name, Static).update("")

    def progress(self, progress: Progress | None) -> None:
        """Show what is under way, None for nothing."""
        self.query_one("#progress").display = progress is not None
        if progress is not None:
            self.query_one("#what", Static).update(progress.what)
            self.query_one("#bar", ProgressBar).update(total=1.0, progress=progress.share or 0.0)
            self.query_one("#bar").display = progress.share is not None
