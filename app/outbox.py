"""Questions on their way: with the files that they mention, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_chat.aside import aside
from dflash_chat.mentions import TYPICAL, attached, mentions
from dflash_mlx.client import DFlashError, check_prompt, check_seen

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp

_UNKNOWN = 1_000_000  # tokens that a model may hold while none is loaded


class Outbox:
    """Sends an app's questions; one that is asked while an answer is written waits for its end."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    async def send(self, line: str, text: str) -> None:
        """Send what was typed; DFlashError for what cannot be sent, which stays in the line.

        line: as it stands in the prompt. text: with pastes in place of their labels.
        """
        if mentions(line):
            room, album = self._room, self._app.album
            files = aside(lambda: attached(line, room, album))
            self._app.hear(files, lambda files: self._with_files(line, text + files))
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
                await self._app.complain(error)

    def give_back(self) -> None:
        """An answer was stopped: what waited for its end goes back into the line."""
        prompt = self._app.prompt
        if prompt.waiting:
            prompt.give_back(*prompt.no_longer_waiting())

    async def _with_files(self, line: str, text: str) -> None:
        prompt = self._app.prompt
        check_seen(self._app.pair, text)
        if prompt.text.startswith(line):  # else it was changed while its files were read
            prompt.pastes.remember(line, text)
            await self._deliver(line, text)

    async def _deliver(self, line: str, text: str) -> None:
        app = self._app
        if app.listener.job is None:
            await app.ask(text)
        else:
            check_prompt(text, app.system, raw=False)
            app.prompt.wait(text)
        app.prompt.take_out(line)

    @property
    def _room(self) -> int:
        app = self._app
        said = sum(len(turn.content) for turn in app.conversation.turns) // TYPICAL
        return (_UNKNOWN if app.pair is None else app.pair.target.context_length) - said
