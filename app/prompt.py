"""The input line: Enter sends, history, and pastes of any size."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import OptionList, Static, TextArea

from dflash_chat.aside import Asks, aside
from dflash_chat.completions import COMMAND, Choice, complete
from dflash_chat.fields import own_keys
from dflash_chat.terminal import assembled
from dflash_mlx.client import bare, dropped

LARGE_PASTE = 10_000  # characters from which a paste is shown as a label
_MOMENT = 0.02  # seconds that a key may wait for the disk to say what would complete it


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
        line = self._lines.get(line, bare(line))
        for label, text in self._texts.items():
            line = line.replace(text, label)
        return line if len(line) < LARGE_PASTE else self.label(line)


class Prompt(Asks, TextArea):
    """The input line. Posts Prompt.Sent; up and down walk through the history.

    choices, hint: widgets of their own, to be shown above it: what would complete the word at the
    cursor, and what waits. waiting: questions that are sent when the answer before them ends.
    """

    BINDINGS = [
        Binding("tab", "complete", "complete", tooltip="complete a command, a model or a file"),
        Binding("enter", "send", "send"),
        Binding("ctrl+j,shift+enter", "newline", "new line"),
        Binding("escape", "close", "close", tooltip="close the list"),
        Binding("up", "go(-1)", "earlier questions, first those that wait", show=False),
        Binding("down", "go(1)", "later questions", show=False),
        Binding("pageup", "app.page('up')", "scroll up", show=False),
        Binding("pagedown", "app.page('down')", "scroll down", show=False),
        Binding("ctrl+z", "app.suspend_process", "suspend; fg goes on", show=False),
        Binding("ctrl+underscore", "undo", "undo what was typed", show=False),
    ]
    typed = reactive(False, bindings=True)  # anything at all
    offering = reactive(False, bindings=True)

    @dataclass
    class Sent(Message):
        """The user pressed Enter on `text`. line: the same as it stands there, with labels."""

        text: str
        line: str = ""

    _KEYS = own_keys([*TextArea.BINDINGS, *BINDINGS])

    def __init__(self) -> None:
        told = "Ask anything · / for commands · @ for a file"
        super().__init__(id="prompt", compact=True, highlight_cursor_line=False, placeholder=told)
        self.questions, self.pastes = History(), Pastes()
        self.hint = Static(id="hint", markup=False)
        self.choices = OptionList(id="choices", compact=True)
        self.choices.can_focus = self.choices.display = self.hint.display = False
        self._line = self._word = ""  # up to the cursor
        self._choices: list[Choice] = []
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
        self._show_waiting()

    def no_longer_waiting(self, count: int | None = None) -> list[str]:
        """Remove and return the first `count` of the questions that wait, or all."""
        taken, self.waiting[:count] = self.waiting[:count], []
        self._show_waiting()
        return taken

    def update_suggestion(self) -> None:
        """Textual calls it after every change: offer what would complete the word."""
        self.typed = self.document.end != (0, 0)
        row, column = self.cursor_location
        if (line := self.document.get_line(row)[:column]) == self._line:
            return
        self._line = line
        if "@" in line or line.startswith("/model "):
            found = aside(lambda: complete(line))
            at_once = wait((found,), _MOMENT).done and not found.exception()
            self._offer(found.result() if at_once else ("", []), line)
            self.hear(found, lambda found: self._offer(found, line))
        else:
            self._offer(complete(line) if self.document.line_count == 1 else ("", []), line)

    def on_text_area_selection_changed(self) -> None:
        self.update_suggestion()

    def _offer(self, found: tuple[str, list[Choice]], line: str) -> None:
        """Offer what `line` may go on with; Enter takes the first of a command's half a name."""
        if line != self._line:
            return
        self._word, choices = found
        if choices != self._choices:
            self._choices, self.choices.display = choices, bool(choices)
            wide = max((len(text) for text, _ in choices), default=0) + 2
            rows = ([(f"{text:<{wide}}", "bold"), (told, "$text-muted")] for text, told in choices)
            self.choices.set_options(map(assembled, rows))
            self.offering = bool(choices)
        if COMMAND.fullmatch(line) and choices:
            self.choices.highlighted = None if choices[0][0].strip() == line else 0

    def _show_waiting(self) -> None:
        self.hint.display = bool(self.waiting)
        questions = " · ".join(map(self.pastes.shorten, self.waiting))
        self.hint.update(f"waiting, up takes back: {questions}")

    def _write(self, text: str) -> None:
        self.text = text
        self.move_cursor(self.document.end)
        self._line = text.rpartition("\n")[2]  # whatever stands there is offered nothing

    # Textual calls the handlers of all classes, this one first; preventing the default stops it.

    async def _on_key(self, event: events.Key) -> None:
        action = self._KEYS.get(event.key)
        if action and (await self.app.run_action(action, self) or event.key == "enter"):
            event.stop()
            event.prevent_default()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What Textual asks before it runs an action or names its key below."""
        typing, choosing = action in ("send", "newline"), action in ("complete", "close")
        return self.typed >= typing and self.offering >= choosing

    def action_send(self) -> None:
        taken = "" if self.choices.highlighted is None else self.action_complete()
        if not taken.endswith((" ", "/")):  # which are to be gone on with
            self.post_message(self.Sent(self.pastes.expand(self.text), self.text))

    def action_complete(self) -> str:
        """Put the chosen one of what completes the word, or else the first, in its place."""
        text, _ = self._choices[self.choices.highlighted or 0]
        row, column = self.cursor_location
        start = row, column - len(self._word)
        self.replace(text, start, (row, column), maintain_selection_offset=False)
        return text

    def action_close(self) -> None:
        self._offer(("", []), self._line)

    def action_newline(self) -> None:
        self.insert("\n")

    def action_go(self, step: int) -> None:
        """Up (-1) or down (1): in the list above, in the text, or to another question."""
        at_edge = self.cursor_location[0] == (0 if step < 0 else self.document.line_count - 1)
        if self.offering:
            self.choices.action_cursor_up() if step < 0 else self.choices.action_cursor_down()
        elif not at_edge:
            self.action_cursor_up() if step < 0 else self.action_cursor_down()
        elif step < 0 and self.waiting:
            self.give_back(*self.no_longer_waiting())
        elif (line := self.questions.move(step, self.text)) is not None:
            self.put(line)

    async def _on_paste(self, event: events.Paste) -> None:
        is_large = len(event.text) >= LARGE_PASTE
        if text := self.pastes.label(event.text) if is_large else dropped(event.text):
            event.stop()
            event.prevent_default()
            self.insert(text)
