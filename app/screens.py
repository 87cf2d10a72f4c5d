"""Small screens over the chat: rows to read, a question to confirm."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Static


class Dialog(ModalScreen[ScreenResultType]):
    """A screen over the chat that closes once, however often its keys are pressed."""

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        """Close with `result`. Nothing where it is closed already or something lies over it."""
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()


class RowsScreen(Dialog[None]):
    """Names and what they mean, in two columns or more."""

    BINDINGS = [("escape,q,enter,f3", "dismiss", "Close")]

    def __init__(self, title: str, rows: Sequence[tuple[str, ...]]) -> None:
        super().__init__()
        self._title, self._rows = title, rows

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title, dialog.border_subtitle = self._title, "Esc closes"
            with VerticalScroll():
                table = Table.grid(padding=(0, 2))
                for row in self._rows:
                    table.add_row(*map(Text, row))
                yield Static(table)


class ConfirmScreen(Dialog[bool]):
    """A question with yes or no."""

    BINDINGS = [("y", "answer(True)", "Yes"), ("n,escape", "answer(False)", "No")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog small") as dialog:
            dialog.border_subtitle = "y yes, n no"
            yield Static(self._question, markup=False)

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
