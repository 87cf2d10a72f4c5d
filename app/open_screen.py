"""Earlier conversations: search, open, rename, delete."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path

from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from dflash_chat.aside import aside
from dflash_chat.conversation import LONGEST_TITLE
from dflash_chat.fields import TextField
from dflash_chat.keeper import Keeper
from dflash_chat.screens import Dialog, confirm
from dflash_chat.store import Entry, Store, text_of

_MOVES = {"up": "cursor_up", "down": "cursor_down", "pageup": "page_up", "pagedown": "page_down"}


class OpenScreen(Dialog[Path | None]):
    """Lists conversations, those that have what is typed; gives the chosen file.

    titles: of the files that were renamed here, None of those that were deleted.
    """

    BINDINGS = [
        ("escape", "leave", "Close"),
        Binding("ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        *(Binding(key, f"list('{move}')", show=False) for key, move in _MOVES.items()),
    ]

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self._keeper = keeper
        self.titles: dict[Path, str | None] = {}
        self._all: list[Entry] = []
        self._entries: list[Entry] = []  # those of them that are shown
        self._texts: dict[Path, str] = {}

    def compose(self) -> ComposeResult:
        keys = "Enter opens, Ctrl+R renames, Ctrl+D deletes, Esc closes"
        with self.frame("Conversations", keys):
            told = "type to search titles and texts"
            yield TextField(placeholder=told, id="search", compact=True)
            yield self.problem_line()
            yield OptionList(markup=False)
            yield TextField(placeholder="new title", id="title", max_length=LONGEST_TITLE)

    def on_mount(self) -> None:
        self._end_renaming()  # at once, so that no key is lost
        self._fill()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[int(event.option.id or 0)].file)

    def action_leave(self) -> None:
        if self._renaming:
            self._end_renaming()
        else:
            self.dismiss(None)

    def action_rename(self) -> None:
        if not self._renaming and (entry := self._chosen()) is not None:
            self.say("")
            title = self.query_one("#title", Input)
            title.value, title.display = entry.title, True
            title.focus()

    def action_delete(self) -> None:
        entry = self._chosen()
        if self._renaming or entry is None:
            return
        self.say("")
        question = f"Delete “{entry.title}” for good?"
        confirm(self.app, question, lambda: self._change(entry, None))

    def action_list(self, move: str) -> None:
        if not self._renaming:
            getattr(self.query_one(OptionList), f"action_{move}")()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "search":
            self.say("")
            self.query_one(OptionList).action_first()
            self._search()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "search":
            self._search(opens=True)
            return
        entry, title = self._chosen(), event.value.strip()
        if entry is not None and title:
            self._change(entry, title)
        self._end_renaming()

    @property
    def _renaming(self) -> bool:
        return bool(self.query_one("#title").display)

    def _end_renaming(self) -> None:
        self.query_one("#title").display = False
        self.query_one("#search").focus()

    def _change(self, entry: Entry, title: str | None) -> None:
        """Give a conversation another title, or delete it; then list what there is."""
        file = entry.file
        self.titles[file] = title

        def change(store: Store) -> None:
            store.delete(file) if title is None else store.rename(file, title)

        def undo(problem: str) -> None:
            del self.titles[file]
            self.say(problem)

        self.hear(self._keeper.ask(change), lambda _: self._fill(), undo)

    def _chosen(self) -> Entry | None:
        option = self.query_one(OptionList).highlighted_option
        return None if option is None else self._entries[int(option.id or 0)]

    def _fill(self) -> None:
        self.hear(self._keeper.ask(Store.entries), self._filled)

    def _filled(self, entries: list[Entry]) -> None:
        self._all, self._texts = entries, {}
        if not entries:
            self.say("No conversation has been saved yet.")
        self._search()

    @property
    def _words(self) -> list[str]:
        return self.query_one("#search", Input).value.casefold().split()

    def _search(self, opens: bool = False) -> None:
        """Show the conversations that have every word that is typed, in whatever case.

        opens: then open the chosen one of them.
        """

        def found(entries: Sequence[Entry]) -> None:
            if words == self._words:  # else another search is under way
                self._show(entries, opens)

        if words := self._words:  # reading them all may take a while
            self.hear(aside(lambda: self._having(words, self._all)), found)
        else:
            self._show(self._all, opens)

    def _having(self, words: list[str], entries: list[Entry]) -> list[Entry]:
        """On a thread: those of `entries` in whose title or text all `words` are."""
        texts = self._texts
        for entry in entries:
            if entry.file not in texts:
                texts[entry.file] = f"{entry.title}\n{text_of(entry)}".casefold()
        return [e for e in entries if all(word in texts[e.file] for word in words)]

    def _show(self, entries: Sequence[Entry], opens: bool) -> None:
        options, chosen = self.query_one(OptionList), self._chosen()
        at = self._entries.index(chosen) if chosen else 0
        self._entries, day = [*entries], ""
        options.clear_options()
        for i, entry in enumerate(entries):
            before, (day, time) = day, when(entry.modified)
            options.add_options([Option(day, disabled=True)] if day != before else ())
            damaged = "  (damaged; opening reads what can be read)" * entry.damaged
            options.add_option(Option(f"  {time:<10}  {entry.title}{damaged}", str(i)))
        if entries:
            options.highlighted = options.get_option_index(str(min(at, len(entries) - 1)))
        elif self._all:
            self.say("No conversation has all these words.")
        if opens and (found := self._chosen()) is not None:
            self.dismiss(found.file)


def when(modified: float) -> tuple[str, str]:
    """Group and time of a last change, by which the list is sorted; in seconds since 1970."""
    then = datetime.fromtimestamp(modified)
    ago = (date.today() - then.date()).days
    if ago < 2:
        return "yesterday" if ago == 1 else "today", f"{then:%H:%M}"
    return "the last seven days" if ago < 7 else "earlier", then.date().isoformat()
