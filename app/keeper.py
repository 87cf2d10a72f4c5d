"""Saving, off the screen's thread."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dflash_chat.conversation import Conversation, Turn
from dflash_chat.store import Store


class Keeper:
    """Writes conversations to a store on threads, one after the other: the last state stays.

    busy: whether one is being written.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._turn = store, asyncio.Lock()

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    async def save(self, conversation: Conversation, *more: Turn) -> None:
        """Save `conversation` with `more` behind it, or delete it where that is nothing at all.

        DFlashError when the folder or the disk refuses.
        """
        async with self._turn:
            kept = replace(conversation, turns=[*conversation.turns, *more])
            await asyncio.to_thread(self._write, kept)
            if kept.created != conversation.created:  # another window had changed the file
                conversation.created, conversation.title = kept.created, kept.title

    def _write(self, conversation: Conversation) -> None:
        if conversation.turns:
            self._store.save(conversation)
        elif not self._store.changed(file := self._store.file_of(conversation)):
            self._store.delete(file)
