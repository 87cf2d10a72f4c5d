"""A short benchmark over the chat: its table grows with every prompt that is finished."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widgets import ProgressBar, Static

from dflash_chat.bench import BenchResult, table
from dflash_chat.screens import Dialog
from dflash_mlx import BenchStep, Job, Pair

_SCROLLBAR = 3  # columns that stay free beside the bars


class BenchScreen(Dialog[None]):
    """Shows a benchmark that is under way; leaving ends it and keeps what was finished."""

    BINDINGS = [("escape,q,enter", "leave", "Leave")]

    def __init__(self, job: Job, pair: Pair | None) -> None:
        super().__init__()
        self.job = job
        self._drafters = 0 if pair is None else pair.means.drafters
        self._step = BenchStep(0, 1)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="bench") as dialog:
            dialog.border_title = "What pays on this machine"
            dialog.border_subtitle = "Esc leaves and keeps what is finished"
            yield Static("warming up", id="under-way", markup=False)
            yield ProgressBar(total=1.0, show_eta=False, id="answered")
            with VerticalScroll():
                yield Static(id="table", markup=False)
                yield Static(id="verdict", markup=False)

    def on_resize(self) -> None:
        self._draw()

    def action_leave(self) -> None:
        self.job.cancelled.set()
        self.dismiss()

    def take(self, event: BenchStep | BenchResult) -> None:
        """Show how far it is, or what came of it."""
        if isinstance(event, BenchStep):
            self._step = event
            self._draw()
        else:
            self._end(f"{event.text}.\n\n{event.saved}")

    def fail(self, problem: str) -> None:
        """It could not be run."""
        self._end(problem)
        self.query_one("#verdict").add_class("error")

    def _draw(self) -> None:
        step = self._step
        if not self.is_mounted or not step.answers:
            return
        done = f"answer {step.answers} of {step.of}, {step.prompts} prompts finished"
        self.query_one("#under-way", Static).update(f"{done}; the methods take turns")
        share = step.answers / step.of
        self.query_one("#answered", ProgressBar).update(total=1.0, progress=share)
        if step.report:
            width = self.query_one(VerticalScroll).size.width - _SCROLLBAR
            self.query_one("#table", Static).update(
                "\n".join(table(step.report, self._drafters, width))
            )

    def _end(self, text: str) -> None:
        self.query_one("#under-way").display = False
        self.query_one("#answered").display = False
        self.query_one("#verdict", Static).update("\n" + text)
