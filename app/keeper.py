"""Saving, and whatever else asks the folder of the conversations, beside the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import TypeVar

from dflash_chat.aside import Line
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.store import Store
from dflash_mlx.client import DFlashError

T = TypeVar("T")
_LOOK = 0.02  # seconds between looks at whether all is written


class Keeper:
    """Asks a store on a thread of its own, in order; nobody waits for a folder that hangs.

    Of a conversation that waits to be saved the newest state is written, once.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._line, self._lock = store, Line(), Lock()
        self._waiting: dict[int, tuple[list[Turn], Future[bool]]] = {}  # by identity
        self._unsaved: dict[int, Conversation] = {}
        self.problem = ""  # why the last one could not be saved

    @property
    def unsaved(self) -> list[str]:
        """Titles of the conversations whose last state is not on disk."""
        return [each.shown_title for each in [*self._unsaved.values()] if each.turns]

    def ask(self, action: Callable[[Store], T]) -> Future[T]:
        """Do something with the store, after all that was asked before."""
        return self._line.put(lambda: action(self._store))

    def save(self, conversation: Conversation, *more: Turn) -> Future[bool]:
        """Save `conversation` with `more` behind it, or delete it where that is nothing at all.

        The result says whether it is a copy now, since another window had changed the file. A
        private one is not saved.
        """
        if conversation.private:
            return self.ask(lambda _: False)
        turns, key = [*conversation.turns, *more], id(conversation)
        with self._lock:
            self._unsaved[key] = conversation
            _, future = self._waiting.get(key, (turns, None))
            future = future or self.ask(lambda store: self._write(store, conversation))
            self._waiting[key] = turns, future
            return future

    def delete(self, conversation: Conversation) -> Future[None]:

        def delete(store: Store) -> None:
            if not conversation.private:
                store.delete(store.file_of(conversation))
            self._unsaved.pop(id(conversation), None)

        return self.ask(delete)

    async def finish(self, seconds: float) -> bool:
        """Wait until all is done; False where that takes longer."""
        last, end = self.ask(lambda _: None), time.monotonic() + seconds
        while not last.done() and time.monotonic() < end:
            await asyncio.sleep(_LOOK)
        return last.done()

    def _write(self, store: Store, conversation: Conversation) -> bool:
        key = id(conversation)
        with self._lock:
            turns, _ = self._waiting.pop(key)
        kept = replace(conversation, turns=turns)
        try:
            if turns:
                store.save(kept)
            elif not store.changed(file := store.file_of(kept)):
                store.delete(file)
        except DFlashError as error:
            self.problem = str(error)
            raise
        copied = kept.created != conversation.created
        if copied:
            conversation.created, conversation.title = kept.created, kept.title
        with self._lock:
            if key not in self._waiting:
                self._unsaved.pop(key, None)
        return copied
