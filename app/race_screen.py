"""The race: the same question decoded plainly and with drafts, side by side."""

from __future__ import annotations

from os.path import commonprefix

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Digits, ProgressBar, Static

from dflash_chat.screens import Comparison
from dflash_chat.terminal import assembled
from dflash_mlx.client import RACE_SIDES, Job, RaceResult, RaceStep

TITLES = dict(zip(RACE_SIDES, ("plain: one token a pass", "drafts: several a pass"), strict=True))


class Side(Vertical):
    """One of the two texts with its own clock, and a bar that fills with its tokens."""

    def __init__(self, side: str) -> None:
        super().__init__(id=side, classes="side")
        self.border_title = TITLES[side]
        self._clock = Static("waiting", classes="clock", markup=False)
        self._bar = ProgressBar(show_percentage=False, show_eta=False)
        self._words = Static(classes="text", markup=False)
        self._scroll = VerticalScroll(self._words, can_focus=False)
        self.text, self._drawn = "", ""
        self.last: RaceStep | None = None

    def compose(self) -> ComposeResult:
        yield self._clock
        yield self._bar
        yield self._scroll

    def take(self, step: RaceStep) -> None:
        """What this side decoded; shown by the next `draw`."""
        self.text += step.text
        self.last = step

    @property
    def width(self) -> int:
        """Columns that its text has."""
        return self._scroll.scrollable_content_region.width

    def draw(self, width: int, total: int) -> None:
        """Bring the side up to date.

        width: of its text, the same for both, so that lines agree. total: tokens that fill its bar.
        """
        self._words.styles.max_width = max(width, 1)
        if self.last is None:
            return
        full = self.last.finished
        self._bar.update(total=total, progress=total if full else self.last.tokens)
        shown = clock(self.last)
        if shown != self._drawn:
            self._drawn = shown
            self._clock.update(shown)
            self._words.update(self.text)
            self._scroll.scroll_end(animate=False)

    def mark_from(self, same: int) -> None:
        """Mark what differs from the other side's: the text behind so many characters."""
        parts = (self.text[:same], ""), (self.text[same:], "$text-warning underline")
        self._words.update(assembled(parts))


class RaceScreen(Comparison):
    """Shows a race that is under way. expected: tokens that the answer may have."""

    def __init__(self, job: Job, expected: int) -> None:
        super().__init__(job)
        self._expected = expected
        self._sides = {side: Side(side) for side in RACE_SIDES}
        self._ratio = Digits(id="times")
        self.verdict.update("Each side's clock runs only while it decodes.")

    def compose(self) -> ComposeResult:
        with self.frame("Race: the same question, twice", "Esc goes back", name="race"):
            yield Horizontal(*self._sides.values(), id="sides")
            with Horizontal(id="outcome"):
                yield self._ratio
                yield self.verdict

    def take(self, event: object) -> None:
        if isinstance(event, RaceStep):
            self._sides[event.side].take(event)
        elif isinstance(event, RaceResult):
            self.end(event.text, "equal" if event.equal else "unequal")
            self._judge(event)

    def _judge(self, result: RaceResult) -> None:
        """Say on the sides what came of it, and how much faster one was in large digits."""
        plain, drafted = (self._sides[side] for side in RACE_SIDES)
        for side in (plain, drafted):
            side.border_subtitle = "✓ same answer" if result.equal else ""
            if not result.equal:
                side.mark_from(len(commonprefix([plain.text, drafted.text])))
        if result.ratio:
            self._ratio.update(f"{result.ratio:.1f}x")
            faster = drafted if result.ratio > 1 else plain
            faster.add_class("faster")
            faster.border_subtitle = f"faster {faster.border_subtitle}".strip()
        self._ratio.display = bool(result.ratio)

    def draw(self) -> None:
        sides = self._sides.values()
        steps = [side.last for side in sides if side.last is not None]
        ends = [step.tokens for step in steps if step.finished]
        total = max(ends or [self._expected, *(step.tokens for step in steps)])
        width = min(side.width for side in sides)
        for side in sides:
            side.draw(width, total)


def clock(step: RaceStep) -> str:
    """Speed, tokens and seconds of one side."""
    speed = f"{step.tokens / step.seconds:.1f} tok/s  " if step.seconds > 0 else ""
    done = "  done" if step.finished else ""
    return f"{speed}{step.tokens} tokens  {step.seconds:.1f} s{done}"
