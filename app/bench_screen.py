"""A short benchmark over the chat: its table grows with every prompt that is finished."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import ProgressBar, Static

from dflash_chat.bench import BenchResult, table
from dflash_chat.screens import Comparison
from dflash_mlx.client import BenchStep, Capabilities, Job, Pair


class BenchScreen(Comparison):
    """Shows a benchmark that is under way; leaving keeps what was finished."""

    def __init__(self, job: Job, pair: Pair | None) -> None:
        super().__init__(job)
        self._means = Capabilities() if pair is None else pair.capabilities
        self._step = BenchStep(0, 1)
        self._done = Static("warming up", markup=False)
        self._bar = ProgressBar(total=1.0)  # which tells the time left
        self._table = Static(markup=False)

    def compose(self) -> ComposeResult:
        keys = "Esc leaves and keeps what is finished"
        with self.frame("What is fastest on this machine", keys, name="bench"):
            yield self._done
            yield self._bar
            with VerticalScroll():
                yield self._table
                yield self.verdict

    def on_resize(self) -> None:
        self.draw()

    def take(self, event: object) -> None:
        if isinstance(event, BenchStep):
            self._step = event
        elif isinstance(event, BenchResult):
            self.end(f"\n{event.text}.\n\n{event.saved}", "told")

    def draw(self) -> None:
        step, self._done.display, self._bar.display = self._step, not self.over, not self.over
        if step.answers:
            done = f"answer {step.answers} of {step.of}, {step.prompts} prompts finished"
            asked = " ".join(step.prompt.split())
            self._done.update(f"{done}; the methods take turns at:\n{asked[:120]}")
            self._bar.update(total=1.0, progress=step.answers / step.of)
        if step.report and (width := self._table.size.width):
            self._table.update("\n".join(table(step.report, self._means, width)))
