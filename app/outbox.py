"""Questions on their way: with the files that they mention, one after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dflash_chat.mentions import TYPICAL, attached, mentions
from dflash_chat.problems import describe
from dflash_mlx import DFlashError, check_prompt

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp

_UNKNOWN = 1_000_000  # tokens that a model may hold while none is loaded


class Outbox:
    """Sends an app's questions; one that is asked while an answer is written waits for its end."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    async def send(self, line: str, text: str) -> None:
        """Send what was typed; what cannot be sent stays in the line, below a sentence why.

        line: as it stands in the prompt. text: with pastes in place of their labels.
        """
        if mentions(line):
            self._app.run_worker(self._read_files(line, text), group="files", exclusive=True)
        else:
            await self._deliver(line, text)

    async def go_on(self) -> None:
        """An answer has ended: send the question that has waited longest."""
        prompt = self._app.prompt
        for question in prompt.no_longer_waiting(1):
            try:
                await self._app.ask(question)
            except DFlashError as error:
                prompt.give_back(question, *prompt.no_longer_waiting())
                await self._app.say(describe(error), "error")

    def give_back(self) -> None:
        """An answer was stopped: what waited for its end goes back into the line."""
        prompt = self._app.prompt
        if prompt.waiting:
            prompt.give_back(*prompt.no_longer_waiting())

    async def _read_files(self, line: str, text: str) -> None:
        """Then send in the app's own turn, where answers end too."""
        try:
            files = await asyncio.to_thread(attached, line, self._room)
        except DFlashError as error:
            await self._app.say(describe(error), "error")
        else:
            self._app.call_later(self._with_files, line, text + files)

    async def _with_files(self, line: str, text: str) -> None:
        prompt = self._app.prompt
        if prompt.text.startswith(line):  # else it was changed while its files were read
            prompt.pastes.remember(line, text)
            await self._deliver(line, text)

    async def _deliver(self, line: str, text: str) -> None:
        app = self._app
        try:
            if app.listener.job is None:
                await app.ask(text)
            else:
                check_prompt(text, app.system, raw=False)
                app.prompt.wait(text)
        except DFlashError as error:
            await app.say(describe(error), "error")
        else:
            app.prompt.take_out(line)

    @property
    def _room(self) -> int:
        """Tokens that are left in the context, counted roughly."""
        app = self._app
        said = sum(len(turn.content) for turn in app.conversation.turns) // TYPICAL
        return (_UNKNOWN if app.pair is None else app.pair.target.context_length) - said
