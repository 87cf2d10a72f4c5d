"""The input line: Enter sends, history, and pastes of any size."""

from __future__ import annotations

from dataclasses import dataclass, field

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea

LARGE_PASTE = 10_000  # characters from which a paste is shown as a label
PLACEHOLDER = "Ask anything · Enter sends · Ctrl+J new line · Esc stops · /help"


@dataclass
class History:
    """Earlier questions, with a place to keep what is being typed."""

    lines: list[str] = field(default_factory=list)
    _at: int = 0
    _draft: str = ""

    def add(self, line: str) -> None:
        """Remember a question that was sent; go to the end."""
        if not self.lines or self.lines[-1] != line:
            self.lines.append(line)
        self._at = len(self.lines)

    def replace(self, lines: list[str]) -> None:
        """The questions of another conversation."""
        self.lines = list(lines)
        self._at = len(self.lines)

    def earlier(self, current: str) -> str | None:
        """The question before, None at the oldest."""
        if self._at == 0:
            return None
        if self._at == len(self.lines):
            self._draft = current
        self._at -= 1
        return self.lines[self._at]

    def later(self) -> str | None:
        """The question after, what was being typed at the end, None behind that."""
        if self._at >= len(self.lines):
            return None
        self._at += 1
        return self._draft if self._at == len(self.lines) else self.lines[self._at]


class Pastes:
    """Large pastes: a short label stands in the input line for each until it is sent."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def label(self, text: str) -> str:
        """Keep `text`; what to show for it."""
        label = f"[paste {len(self._texts) + 1}: {len(text):,} characters]"
        self._texts[label] = text
        return label

    def expand(self, line: str) -> str:
        """`line` with the texts in place of their labels."""
        for label, text in self._texts.items():
            line = line.replace(label, text)
        return line

    def shorten(self, line: str) -> str:
        """The reverse of `expand`, for a question that comes back into the input line."""
        for label, text in self._texts.items():
            line = line.replace(text, label)
        return line if len(line) < LARGE_PASTE else self.label(line)


class Prompt(TextArea):
    """The input line. Posts Prompt.Sent; up and down leave it for the history at its edges."""

    BINDINGS = [
        Binding("pageup", "app.page(-1)", "Scroll up", show=False),
        Binding("pagedown", "app.page(1)", "Scroll down", show=False),
    ]

    @dataclass
    class Sent(Message):
        """The user pressed Enter on `text`."""

        text: str

    def __init__(self) -> None:
        super().__init__(
            id="prompt", compact=True, highlight_cursor_line=False, placeholder=PLACEHOLDER
        )
        self.questions = History()
        self.pastes = Pastes()

    def put(self, text: str) -> None:
        """Replace what is typed, with the cursor behind it."""
        self.text = self.pastes.shorten(text)
        self.move_cursor(self.document.end)

    # Textual calls the handlers of all classes, this one first; preventing the default stops it.

    async def _on_key(self, event: events.Key) -> None:
        handled = True
        if event.key == "enter":
            self.post_message(self.Sent(self.pastes.expand(self.text)))
        elif event.key in ("shift+enter", "ctrl+j"):
            self.insert("\n")
        elif event.key == "up" and self.cursor_location[0] == 0:
            self._show(self.questions.earlier(self.text))
        elif event.key == "down" and self.cursor_location[0] == self.document.line_count - 1:
            self._show(self.questions.later())
        else:
            handled = False
        if handled:
            event.stop()
            event.prevent_default()

    async def _on_paste(self, event: events.Paste) -> None:
        if len(event.text) >= LARGE_PASTE:
            event.stop()
            event.prevent_default()
            self.insert(self.pastes.label(event.text))

    def _show(self, line: str | None) -> None:
        if line is not None:
            self.put(line)
