"""Earlier conversations: search, open, rename, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dflash_chat.conversation import LONGEST_TITLE
from dflash_chat.screens import ConfirmScreen, Dialog
from dflash_chat.store import Entry, Store, text_of
from dflash_mlx import DFlashError


class OpenScreen(Dialog[Path | None]):
    """Lists a store's conversations, those that have what is typed; gives the chosen file.

    The store is asked on another thread, because a folder on a network can be slow.
    """

    BINDINGS = [
        ("escape", "close", "Close"),
        Binding("ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        Binding("up", "list('cursor_up')", "Up", show=False),
        Binding("down", "list('cursor_down')", "Down", show=False),
        Binding("pageup", "list('page_up')", "Page up", show=False),
        Binding("pagedown", "list('page_down')", "Page down", show=False),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._all: list[Entry] = []
        self._entries: list[Entry] = []  # those of them that are shown
        self._texts: dict[Path, str] = {}

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "Conversations"
            dialog.border_subtitle = "Enter opens, Ctrl+R renames, Ctrl+D deletes, Esc closes"
            yield Input(placeholder="type to search titles and texts", id="search", compact=True)
            yield Static(id="problem", markup=False)
            yield OptionList(markup=False)
            yield Input(placeholder="new title", id="title", max_length=LONGEST_TITLE)

    async def on_mount(self) -> None:
        self._say("")
        self.query_one("#title").display = False
        self.query_one("#search").focus()  # at once, so that no key is lost
        self.run_worker(self._fill(), group="fill")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index].file)

    async def action_close(self) -> None:
        if self._renaming:
            await self._end_renaming()
        else:
            self.dismiss(None)

    def action_rename(self) -> None:
        if not self._renaming and (entry := self._chosen()) is not None:
            self._say("")
            title = self.query_one("#title", Input)
            title.value, title.display = entry.title, True
            title.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "search":
            self._say("")
            self.query_one(OptionList).action_first()
            self._search()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "search":
            self._open()
            return
        entry = self._chosen()
        if entry is not None and event.value.strip():
            await self._try(lambda: self._store.rename(entry.file, event.value.strip()))
        await self._end_renaming()

    def action_list(self, move: str) -> None:
        """Move in the list while the keys go into the search."""
        if not self._renaming:
            getattr(self.query_one(OptionList), f"action_{move}")()

    def action_delete(self) -> None:
        entry = self._chosen()
        if self._renaming or entry is None:
            return
        self._say("")

        async def delete(sure: bool | None) -> None:
            if sure:
                await self._try(lambda: self._store.delete(entry.file))
                await self._fill()

        self.app.push_screen(ConfirmScreen(f"Delete “{entry.title}” for good?"), delete)

    @property
    def _renaming(self) -> bool:
        return bool(self.query_one("#title").display)

    async def _end_renaming(self) -> None:
        self.query_one("#title").display = False
        self.query_one("#search").focus()
        await self._fill()

    def _chosen(self) -> Entry | None:
        at = self.query_one(OptionList).highlighted
        return self._entries[at] if at is not None else None

    async def _fill(self) -> None:
        """Read what there is, and show what was searched for."""
        if await self._try(self._read) and not self._all:
            self._say("No conversation has been saved yet.")
        self._search()

    def _read(self) -> None:
        self._all, self._texts = self._store.entries(), {}

    @work(exclusive=True)
    async def _search(self) -> None:
        await self._show()

    @work(exclusive=True)
    async def _open(self) -> None:
        """Open what is chosen of all that is found, though it may still be searched for."""
        await self._show()
        if (entry := self._chosen()) is not None:
            self.dismiss(entry.file)

    async def _show(self) -> None:
        """Show the conversations that have every word that is typed, in whatever case."""
        words, found = self.query_one("#search", Input).value.casefold().split(), self._all
        if words:  # reading them all may take a while
            found = await asyncio.to_thread(self._having, words, self._all)
        options, self._entries = self.query_one(OptionList), found
        at = options.highlighted or 0
        options.clear_options()
        options.add_options([Option(_line(entry)) for entry in found])
        if found:
            options.highlighted = min(at, len(found) - 1)
        elif words and self._all:
            self._say("No conversation has all these words.")

    def _having(self, words: list[str], entries: list[Entry]) -> list[Entry]:
        """On a thread: those of `entries` in whose title or text all `words` are."""
        texts = self._texts
        for entry in entries:
            if entry.file not in texts:
                texts[entry.file] = f"{entry.title}\n{text_of(entry)}".casefold()
        return [e for e in entries if all(word in texts[e.file] for word in words)]

    async def _try(self, action: Callable[[], None]) -> bool:
        """Whether it was done; a problem stays on screen until the next key."""
        try:
            await asyncio.to_thread(action)
        except DFlashError as error:
            self._say(str(error))
            return False
        return True

    def _say(self, text: str) -> None:
        problem = self.query_one("#problem", Static)
        problem.update(text)
        problem.display = bool(text)


def _line(entry: Entry) -> str:
    day, _, clock = entry.created.partition("T")
    damaged = "  (damaged; opening reads what can be read)" if entry.damaged else ""
    return f"{day} {clock[:5].replace('-', ':')}  {entry.title}{damaged}"
