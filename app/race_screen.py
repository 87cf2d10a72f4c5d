"""The race: the same question decoded plainly and with drafts, side by side."""

from __future__ import annotations

from os.path import commonprefix

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Digits, ProgressBar, Static

from dflash_chat.screens import Dialog
from dflash_chat.terminal import assembled
from dflash_mlx.client import RACE_SIDES, Job, RaceResult, RaceStep, counted

TITLES = "plain: one token a pass", "drafts: several a pass"


class Side(Vertical):
    """One of the two texts with its own clock, and a bar that fills with its tokens."""

    def __init__(self, side: str, title: str) -> None:
        super().__init__(id=side, classes="side")
        self.border_title = title
        self._clock = Static("waiting", classes="clock", markup=False)
        self._bar = ProgressBar(show_percentage=False, show_eta=False)
        self.words = Static(classes="text", markup=False)
        self.scroll = VerticalScroll(self.words, can_focus=False)
        self.text, self._drawn = "", ""
        self.last: RaceStep | None = None

    def compose(self) -> ComposeResult:
        yield self._clock
        yield self._bar
        yield self.scroll

    def draw(self, total: int) -> None:
        """Bring the side up to date. total: tokens that fill its bar."""
        if (step := self.last) is None:
            return
        self._bar.update(total=total, progress=total if step.finished else step.tokens)
        speed = f"{step.tokens / step.seconds:.1f} tok/s  " if step.seconds > 0 else ""
        shown = f"{speed}{counted(step.tokens, 'token')}  {step.seconds:.1f} s"
        shown += "  done" * step.finished
        if shown != self._drawn:
            self._drawn = shown
            self._clock.update(shown)
            self.words.update(self.text)
            self.scroll.scroll_end(animate=False)

    def stay_out(self) -> None:
        """The race is over, and this side waits for nothing any more."""
        if self.last is None:
            self._clock.update("")
            self._bar.display = False


class RaceScreen(Dialog[None]):
    """Shows a race that is under way; leaving stops it.

    job: the worker's. expected: tokens that the answer may have. over: whether it has ended.
    """

    BINDINGS = [("escape,q,enter", "leave", "Leave")]

    def __init__(self, job: Job, expected: int) -> None:
        super().__init__()
        self.job, self._expected, self.over = job, expected, False
        said = "Each side's clock runs only while it decodes."
        self._verdict = Static(said, id="verdict", markup=False)
        self._sides = [Side(*named) for named in zip(RACE_SIDES, TITLES, strict=True)]
        self._ratio = Digits(id="times")

    def compose(self) -> ComposeResult:
        with self.frame("Race: the same question, twice", "Esc goes back", name="race"):
            yield Horizontal(*self._sides, id="sides")
            yield Horizontal(self._ratio, self._verdict, id="outcome")

    def action_leave(self) -> None:
        self.job.cancelled.set()
        self.dismiss()

    def take(self, event: object) -> None:
        """What the worker says of it."""
        if isinstance(event, RaceStep):
            side = self._sides[RACE_SIDES.index(event.side)]
            side.text, side.last = side.text + event.text, event
        elif isinstance(event, RaceResult):
            self.end(event.text, "equal" if event.equal else "unequal")
            self._judge(event)

    def _judge(self, result: RaceResult) -> None:
        """Mark what differs, and the faster side; its ratio in large digits."""
        same = len(commonprefix([side.text for side in self._sides]))
        for side in self._sides:
            side.border_subtitle = "✓ same answer" if result.equal else ""
            parts = (side.text[:same], ""), (side.text[same:], "$text-warning underline")
            side.words.update(assembled(parts))
            self.call_after_refresh(side.scroll.scroll_end, animate=False)  # it got smaller
        if result.ratio:
            self._ratio.display = True
            self._ratio.update(f"{result.ratio:.1f}x")
            faster = self._sides[result.ratio > 1]
            faster.add_class("faster")
            faster.border_subtitle = ", ".join(filter(None, [faster.border_subtitle, "faster"]))

    def draw(self) -> None:
        steps = [side.last for side in self._sides if side.last is not None]
        ends = [step.tokens for step in steps if step.finished]
        total = max(ends or [self._expected, *(step.tokens for step in steps)])
        width = min(side.scroll.scrollable_content_region.width for side in self._sides)
        for side in self._sides:
            side.words.styles.max_width = max(width, 1)  # of both, so that lines agree
            side.draw(total)

    def end(self, text: str, kind: str = "error") -> None:
        """It is over, and this is what came of it; by default, why it could not be run."""
        self.over = True
        self.draw()
        for side in self._sides:
            side.stay_out()
        self._verdict.update(text)
        self._verdict.add_class(kind)
