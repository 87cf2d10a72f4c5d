"""The race: the same question decoded plainly and with drafts, side by side."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from dflash_chat.screens import Comparison
from dflash_mlx.client import RACE_SIDES, Job, RaceResult, RaceStep

TITLES = dict(
    zip(
        RACE_SIDES,
        ("plain decoding, a pass for every token", "with drafts, several tokens in a pass"),
        strict=True,
    )
)


class Side(Vertical):
    """One of the two texts with its own clock."""

    def __init__(self, side: str) -> None:
        super().__init__(id=side, classes="side")
        self.border_title = TITLES[side]
        self._clock = Static("waiting", classes="clock", markup=False)
        self._words = Static(classes="text", markup=False)
        self._scroll = VerticalScroll(self._words, can_focus=False)
        self._text, self._drawn = "", ""
        self._last: RaceStep | None = None

    @property
    def speed(self) -> float:
        """Tokens per second so far."""
        return self._last.tokens / self._last.seconds if self._last and self._last.seconds else 0.0

    def compose(self) -> ComposeResult:
        yield self._clock
        yield self._scroll

    def take(self, step: RaceStep) -> None:
        """What this side decoded; shown by the next `draw`."""
        self._text += step.text
        self._last = step

    @property
    def width(self) -> int:
        """Columns that its text has."""
        return self._scroll.scrollable_content_region.width

    def draw(self, width: int) -> None:
        """Bring the side up to date. width: of its text, the same for both, so that lines agree."""
        self._words.styles.max_width = max(width, 1)
        shown = clock(self._last) if self._last is not None else ""
        if shown != self._drawn:
            self._drawn = shown
            self._clock.update(shown)
            self._words.update(self._text)
            self._scroll.scroll_end(animate=False)


class RaceScreen(Comparison):
    """Shows a race that is under way."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._sides = {side: Side(side) for side in RACE_SIDES}
        self.verdict.update("Each side's clock runs only while it decodes.")

    def compose(self) -> ComposeResult:
        with self.frame("Race: the same question, twice", "Esc goes back", name="race"):
            yield Horizontal(*self._sides.values(), id="sides")
            yield self.verdict

    def take(self, event: object) -> None:
        if isinstance(event, RaceStep):
            self._sides[event.side].take(event)
        elif isinstance(event, RaceResult):
            self.end(event.text, "equal" if event.equal else "unequal")
            if event.equal:
                fastest = max(self._sides.values(), key=lambda side: side.speed)
                fastest.add_class("faster")
                fastest.border_subtitle = "faster"

    def draw(self) -> None:
        width = min(side.width for side in self._sides.values())
        for side in self._sides.values():
            side.draw(width)


def clock(step: RaceStep) -> str:
    """Tokens, seconds and speed of one side."""
    speed = f"{step.tokens / step.seconds:.1f} tok/s" if step.seconds > 0 else ""
    done = "  done" if step.finished else ""
    return f"{step.tokens} tokens  {step.seconds:.1f} s  {speed}{done}"
