"""Earlier conversations: open, rename, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dflash_chat.conversation import LONGEST_TITLE
from dflash_chat.screens import ConfirmScreen, Dialog
from dflash_chat.store import Entry, Store
from dflash_mlx import DFlashError


class OpenScreen(Dialog[Path | None]):
    """Lists a store's conversations; gives the file of the chosen one.

    The store is asked on another thread, because a folder on a network can be slow.
    """

    BINDINGS = [
        ("escape", "close", "Close"),
        ("r", "rename", "Rename"),
        ("d,delete", "delete", "Delete"),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._entries: list[Entry] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "Conversations"
            dialog.border_subtitle = "Enter opens, r renames, d deletes, Esc closes"
            yield Static(id="problem", markup=False)
            yield OptionList(markup=False)
            yield Input(placeholder="new title", id="title", max_length=LONGEST_TITLE)

    async def on_mount(self) -> None:
        self._say("")
        self.query_one("#title").display = False
        await self._fill()
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index].file)

    async def action_close(self) -> None:
        if self.query_one("#title").display:
            await self._end_renaming()
        else:
            self.dismiss(None)

    def action_rename(self) -> None:
        self._say("")
        if (entry := self._chosen()) is not None:
            title = self.query_one("#title", Input)
            title.value, title.display = entry.title, True
            title.focus()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        entry = self._chosen()
        if entry is not None and event.value.strip():
            await self._try(lambda: self._store.rename(entry.file, event.value.strip()))
        await self._end_renaming()

    def action_delete(self) -> None:
        self._say("")
        entry = self._chosen()
        if entry is None:
            return

        async def delete(sure: bool | None) -> None:
            if sure:
                await self._try(lambda: self._store.delete(entry.file))
                await self._fill()

        self.app.push_screen(ConfirmScreen(f"Delete “{entry.title}” for good?"), delete)

    async def _end_renaming(self) -> None:
        self.query_one("#title").display = False
        await self._fill()
        self.query_one(OptionList).focus()

    def _chosen(self) -> Entry | None:
        at = self.query_one(OptionList).highlighted
        return self._entries[at] if at is not None else None

    async def _fill(self) -> None:
        known = await self._try(self._read)
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        options.clear_options()
        options.add_options([Option(_line(entry)) for entry in self._entries])
        if self._entries:
            options.highlighted = min(at, len(self._entries) - 1)
        elif known:
            self._say("No conversation has been saved yet.")

    def _read(self) -> None:
        self._entries = self._store.entries()

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
