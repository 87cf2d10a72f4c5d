"""The input line: Enter sends, history, and pastes of any size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import Static, TextArea

from dflash_chat.commands import Command, completions
from dflash_chat.fields import own_keys

PROMISE = "drafts are guesses: the large model decides on every token"
LARGE_PASTE = 10_000  # characters from which a paste is shown as a label


def placeholder(platform: str) -> str:
    """The empty line's text. A MacBook keeps F2 to F4 for itself; narrow screens cut the end."""
    keys = ("Ctrl+T", "Ctrl+G", "Ctrl+R") if platform == "darwin" else ("F2", "F3", "F4")
    return "Ask anything · /help · Esc stops · {} who guessed it · {} figures · {} race".format(
        *keys
    )


class History:
    """Earlier questions, with a place to keep what is being typed."""

    def __init__(self) -> None:
        self.replace([])
        self._draft = ""

    def replace(self, lines: list[str]) -> None:
        """The questions of another conversation."""
        self.lines, self._at = [*lines], len(lines)

    def add(self, line: str) -> None:
        """Remember a question that was sent; go to the end."""
        again = self.lines[-1:] == [line]
        self.replace(self.lines if again else [*self.lines, line])

    def move(self, step: int, current: str) -> str | None:
        """The question before (-1) or after (1), behind the last what was typed; None for none."""
        at, end = self._at + step, len(self.lines)
        if not 0 <= at <= end:
            return None
        if self._at == end:
            self._draft = current
        self._at = at
        return self._draft if at == end else self.lines[at]


class Pastes:
    """Large pastes: a short label stands in the input line for each until it is sent."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lines: dict[str, str] = {}  # questions as they were typed, by what was sent

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

    def remember(self, line: str, sent: str) -> None:
        """`sent` is what became of `line`, with the files that it mentions."""
        self._lines[sent] = line

    def shorten(self, line: str) -> str:
        """What was typed for a question that comes back into the input line."""
        line = self._lines.get(line, line)
        for label, text in self._texts.items():
            line = line.replace(text, label)
        return line if len(line) < LARGE_PASTE else self.label(line)


SHOWN = 40  # characters of a waiting question that are shown


class Hint(Static):
    """The line above the prompt: commands that would complete it, or what waits to be sent."""

    DEFAULT_CSS = "Hint { height: auto; max-height: 3; padding: 0 1; color: $text-muted; }"

    def __init__(self) -> None:
        super().__init__(id="hint", markup=False)
        self.display, self._said = False, ""

    def say(self, text: str) -> None:
        """Show one line; "" takes none."""
        if text != self._said:  # laying the screen out again has its price
            self._said, self.display = text, bool(text)
            self.update(text)


class Prompt(TextArea):
    """The input line. Posts Prompt.Sent; up and down walk through the history.

    hint: a widget of its own, to be shown above it. waiting: questions that are sent when the
    answer before them ends.
    """

    BINDINGS = [
        Binding("pageup", "app.page(-1)", "Scroll up", show=False),
        Binding("pagedown", "app.page(1)", "Scroll down", show=False),
        Binding("ctrl+z", "app.suspend_process", "Suspend", show=False),
        Binding("ctrl+underscore", "undo", "Undo", show=False),
    ]

    @dataclass
    class Sent(Message):
        """The user pressed Enter on `text`. line: the same as it stands there, with labels."""

        text: str
        line: str = ""

    _KEYS = own_keys([*TextArea.BINDINGS, *BINDINGS])

    def __init__(self) -> None:
        super().__init__(
            id="prompt",
            compact=True,
            highlight_cursor_line=False,
            placeholder=placeholder(sys.platform),
        )
        self.questions = History()
        self.pastes, self.hint = Pastes(), Hint()
        self.border_subtitle = PROMISE
        self.waiting: list[str] = []

    def put(self, text: str) -> None:
        """Replace what is typed, with the cursor behind it."""
        self._write(self.pastes.shorten(text))

    def take_out(self, line: str) -> None:
        """`line` was sent; what was typed behind it meanwhile stays."""
        self._write(self.text.removeprefix(line))

    def give_back(self, *questions: str) -> None:
        """Put questions in front of what is typed."""
        lines = [*map(self.pastes.shorten, questions), self.text]
        self._write("\n".join(line for line in lines if line.strip()))

    def wait(self, question: str) -> None:
        """Keep a question until the answer before it ends."""
        self.waiting.append(question)
        self.update_suggestion()

    def no_longer_waiting(self, count: int | None = None) -> list[str]:
        """Remove and return the first `count` of the questions that wait, or all."""
        taken, self.waiting[:count] = self.waiting[:count], []
        self.update_suggestion()
        return taken

    def update_suggestion(self) -> None:
        """Textual calls it after every change: show what would complete a command."""
        found = completions(self.text)
        at_end = self.cursor_location == self.document.end
        self.suggestion = found[0].name[len(self.text) - 1 :] if found and at_end else ""
        self.hint.say(self._hint_for(found))

    def on_text_area_selection_changed(self) -> None:
        self.update_suggestion()

    def _hint_for(self, found: Sequence[Command]) -> str:
        if len(found) == 1:
            return f"{found[0].usage}  {found[0].help}"
        if found:
            return "Tab completes  " + "  ".join(f"/{command.name}" for command in found)
        if not self.waiting:
            return ""
        first = " ".join(self.pastes.shorten(self.waiting[0]).split())
        first = first if len(first) <= SHOWN else first[: SHOWN - 1] + "…"
        more = f" and {len(self.waiting) - 1} more" if self.waiting[1:] else ""
        return f"waiting: {first}{more}  (Up takes it back)"

    def _write(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)

    # Textual calls the handlers of all classes, this one first; preventing the default stops it.

    async def _on_key(self, event: events.Key) -> None:
        handled = True
        if event.key == "enter":
            self.post_message(self.Sent(self.pastes.expand(self.text), self.text))
        elif event.key == "tab" and (found := completions(self.text)):
            self._write(f"/{found[0].name} " if found[0].needs_argument else f"/{found[0].name}")
        elif event.key in ("shift+enter", "ctrl+j"):
            self.insert("\n")
        elif event.key == "up" and self.cursor_location[0] == 0:
            self._go_back()
        elif event.key == "down" and self.cursor_location[0] == self.document.line_count - 1:
            self._show(self.questions.move(1, self.text))
        elif event.key in self._KEYS:
            await self.run_action(self._KEYS[event.key])
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

    def _go_back(self) -> None:
        if self.waiting:
            self.give_back(*self.no_longer_waiting())
        else:
            self._show(self.questions.move(-1, self.text))

    def _show(self, line: str | None) -> None:
        if line is not None:
            self.put(line)
