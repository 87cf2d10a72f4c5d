"""The race: the same question decoded plainly and with drafts, side by side."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_chat.race import DRAFTED, PLAIN, RaceResult, RaceStep
from dflash_chat.screens import Dialog
from dflash_mlx import Job

TITLES = {PLAIN: "plain decoding", DRAFTED: "with drafts"}


class Side(Vertical):
    """One of the two texts with its own clock."""

    def __init__(self, side: str) -> None:
        super().__init__(id=side, classes="side")
        self._side, self._text, self._drawn = side, "", ""
        self._last: RaceStep | None = None

    def compose(self) -> ComposeResult:
        self.border_title = TITLES[self._side]
        yield Static("waiting", classes="clock", markup=False)
        with VerticalScroll(can_focus=False):
            yield Static(classes="text", markup=False)

    def take(self, step: RaceStep) -> None:
        """What this side decoded; shown by the next `draw`."""
        self._text += step.text
        self._last = step

    def draw(self) -> None:
        """Bring the side up to date."""
        if (
            self.is_mounted
            and self._last is not None
            and self._drawn != (shown := clock(self._last))
        ):
            self._drawn = shown
            self.query_one(".clock", Static).update(shown)
            self.query_one(".text", Static).update(self._text)
            self.query_one(VerticalScroll).scroll_end(animate=False)


class RaceScreen(Dialog[None]):
    """Shows a race that is under way; leaving stops it."""

    BINDINGS = [("escape,q,enter", "leave", "Leave")]

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.over = False
        self._sides = {side: Side(side) for side in (PLAIN, DRAFTED)}
        self._verdict = Static("Each side's clock runs only while it decodes.", id="verdict")

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="race") as dialog:
            dialog.border_title = "Race: the same question, twice"
            dialog.border_subtitle = "Esc leaves"
            yield Horizontal(*self._sides.values(), id="sides")
            yield self._verdict

    def action_leave(self) -> None:
        self.job.cancelled.set()
        self.dismiss()

    def take(self, step: RaceStep) -> None:
        """A step of this race; shown by the next `draw`."""
        self._sides[step.side].take(step)

    def draw(self) -> None:
        """Bring both sides up to date."""
        for side in self._sides.values():
            side.draw()

    def finish(self, result: RaceResult) -> None:
        """The race is over."""
        self.draw()
        self._say(result.text, "equal" if result.equal else "unequal")

    def fail(self, problem: str) -> None:
        """The race could not be run."""
        self._say(problem, "error")

    def _say(self, text: str, kind: str) -> None:
        self.over = True
        self._verdict.update(Content(text))
        self._verdict.add_class(kind)


def clock(step: RaceStep) -> str:
    """Tokens, seconds and speed of one side."""
    speed = f"{step.tokens / step.seconds:.1f} tok/s" if step.seconds > 0 else ""
    done = "  done" if step.finished else ""
    return f"{step.tokens} tokens  {step.seconds:.1f} s  {speed}{done}"
