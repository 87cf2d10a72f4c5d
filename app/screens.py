"""What the screens over the chat share; the small ones: rows to read, a question to confirm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.await_complete import AwaitComplete
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Static

from dflash_chat.aside import Asks

T = TypeVar("T")


class Dialog(Asks, ModalScreen[ScreenResultType]):
    """A screen over the chat that closes once, however often its keys are pressed."""

    def frame(self, title: str, keys: str, more: str = "", name: str | None = None) -> Vertical:
        """What all others are in. more: classes. name: its id."""
        frame = Vertical(classes=f"dialog {more}", id=name)
        frame.border_title, frame.border_subtitle = title, keys
        return frame

    def problem_line(self) -> Static:
        """The line for `say`."""
        return Static(id="problem", markup=False)

    def say(self, text: str) -> None:
        """Show a sentence in the line for it; "" takes the line away."""
        line = self.query_one("#problem", Static)
        line.update(text)
        line.display = bool(text)

    def refuse(self, problem: str) -> None:
        self.say(problem)

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Close with `result`. Nothing where it is closed already or something lies over it."""
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()

    def action_leave(self) -> None:
        self.dismiss(None)


def when_given(then: Callable[[T], object]) -> Callable[[T | None], None]:
    """What takes the result of a screen: `then`, unless it was left without one."""

    def take(result: T | None) -> None:
        if result is not None:
            then(result)

    return take


class RowsScreen(Dialog[None]):
    """Names and what they mean, in two columns or more."""

    BINDINGS = [("escape,q,enter,f3", "leave", "Close")]

    def __init__(self, title: str, rows: Sequence[tuple[str, ...]]) -> None:
        super().__init__()
        self._title, self._rows = title, rows

    def compose(self) -> ComposeResult:
        table = Table.grid(padding=(0, 2))
        for row in self._rows:
            table.add_row(Text(row[0], "bold"), *map(Text, row[1:]))
        with self.frame(self._title, "↑ ↓ scroll, Esc closes"), VerticalScroll():
            yield Static(table)


class ConfirmScreen(Dialog[bool]):
    """A question with yes or no."""

    BINDINGS = [("y", "answer(True)", "Yes"), ("n,escape", "answer(False)", "No")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with self.frame("", "y yes, n no", "small"):
            yield Static(self._question, markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


def confirm(app: App[Any], question: str, act: Callable[[], object]) -> None:
    """Do it where the user says yes."""
    app.push_screen(ConfirmScreen(question), when_given(lambda yes: yes and act()))
