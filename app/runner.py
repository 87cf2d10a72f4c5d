"""What each slash command does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_chat.commands import Call, help_rows
from dflash_chat.conversation import LONGEST_TITLE, Conversation
from dflash_chat.figures import explained, statistics_rows
from dflash_chat.open_screen import OpenScreen
from dflash_chat.picker_screen import PickerScreen
from dflash_chat.race_screen import RaceScreen
from dflash_chat.screens import ConfirmScreen, RowsScreen
from dflash_chat.settings_screen import SettingsScreen
from dflash_chat.store import export
from dflash_chat.themes import THEMES
from dflash_mlx import DecodeConfig, DFlashError, PairConfig, method_choices, settle

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp


class CommandRunner:
    """Runs commands on an app: each is a method `_name` that takes what was typed behind it."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    async def run(self, call: Call) -> None:
        """Run one command; DFlashError where it cannot be done."""
        await getattr(self, f"_{call.command.name}")(call.argument)

    async def _model(self, name: str) -> None:
        if name:
            self._load(PairConfig(model=name))
        else:
            self._app.push_screen(PickerScreen(), self._load)

    async def _drafter(self, name: str) -> None:
        self._load(replace(self._app.pair_config, drafter=name))

    def _load(self, config: PairConfig | None) -> None:
        if config is not None:
            self._app.load(config)

    async def _method(self, name: str) -> None:
        app = self._app
        if name:
            if name not in method_choices():
                offered = ", ".join(method_choices())
                raise DFlashError(f"method is {name!r}", f"choose one of {offered}")
            app.set_config(replace(app.config, method=name))
        here = "" if app.pair is None else settle(app.config, app.pair.means).method
        chosen = f", which is {here} with this model" if here not in ("", app.config.method) else ""
        await app.say(f"The method is {app.config.method}{chosen}.")

    async def _temperature(self, text: str) -> None:
        app = self._app
        if text:
            try:
                value = float(text)
            except ValueError:
                raise DFlashError(
                    f"temperature is {text!r}", "type a number, 0 is greedy"
                ) from None
            app.set_sampling(replace(app.config.sampling, temperature=value))
        await app.say(f"The temperature is {app.config.sampling.temperature:g}.")

    async def _system(self, text: str) -> None:
        app = self._app
        if text:
            app.system = None if text == "-" else text
        await app.say(f"The system prompt is: {app.system}" if app.system else "No system prompt.")

    async def _settings(self, _: str) -> None:
        self._app.push_screen(SettingsScreen(self._app.config), self._apply)

    def _apply(self, config: DecodeConfig | None) -> None:
        if config is not None:
            self._app.set_config(config)

    async def _race(self, text: str) -> None:
        app = self._app
        self._need_idle()
        if app.listener.race is not None:  # the palette opens over a race, too
            raise DFlashError("a race is being run", "leave it with Esc first")
        app.listener.race = RaceScreen(app.race(app.request(text or None)))
        app.push_screen(app.listener.race, self._race_left)

    def _race_left(self, _: None) -> None:
        self._app.listener.race = None

    async def _draft(self, _: str) -> None:
        panel = self._app.draft
        panel.display = not panel.display
        self._app.base.set_class(panel.display, "-draft")
        panel.draw()
        self._app.transcript.tint(panel.tinted())

    async def _stats(self, _: str) -> None:
        status = self._app.status
        if (figures := status.figures) is None:
            raise DFlashError("there is no answer yet", "ask something first")
        rows = explained(statistics_rows(figures))
        self._app.push_screen(RowsScreen("The last answer", rows))

    async def _new(self, _: str) -> None:
        self._need_idle()
        await self._app.show_conversation(Conversation())

    async def _open(self, _: str) -> None:
        self._need_idle()
        stored = self._app.store.holds(self._app.conversation)
        screen = OpenScreen(self._app.store)
        self._app.push_screen(screen, lambda file: self._opened(file, stored))

    async def _opened(self, file: Path | None, stored: bool) -> None:
        """stored: whether the conversation on screen was in the list."""
        app = self._app
        try:
            if file is not None:
                opened = app.store.open(file)
                await app.show_conversation(opened.conversation, opened.problem)
            elif stored:
                await self._closed_list()
        except DFlashError as error:
            await app.say(str(error), "error")

    async def _closed_list(self) -> None:
        """The conversation on screen may have been renamed or deleted in the list."""
        app = self._app
        if app.store.holds(app.conversation):
            file = app.store.file_of(app.conversation)
            app.conversation.title = app.store.read(file).conversation.title
            app.show_header()
        elif app.conversation.turns:
            await app.show_conversation(Conversation())

    async def _rename(self, title: str) -> None:
        self._app.conversation.title = title[:LONGEST_TITLE]
        await self._app.save()
        self._app.show_header()

    async def _delete(self, _: str) -> None:
        self._need_idle()
        title = self._app.conversation.shown_title
        self._app.push_screen(ConfirmScreen(f"Delete “{title}” for good?"), self._deleted)

    async def _deleted(self, sure: bool | None) -> None:
        app = self._app
        if not sure:
            return
        try:
            app.store.delete(app.store.file_of(app.conversation))
        except DFlashError as error:
            await app.say(str(error), "error")
            return
        await app.show_conversation(Conversation())

    async def _export(self, name: str) -> None:
        app = self._app
        file = _named_file(name) if name else _free_file(app.conversation.shown_title)
        export(app.conversation, file)
        await app.say(f"Written to {file.resolve()}.")

    async def _theme(self, _: str) -> None:
        dark = self._app.current_theme.dark
        self._app.theme = THEMES["light" if dark else "dark"].name

    async def _help(self, _: str) -> None:
        self._app.push_screen(RowsScreen("dflash-chat", help_rows()))

    async def _quit(self, _: str) -> None:
        await self._app.action_quit()

    def _need_idle(self) -> None:
        if self._app.listener.job is not None:
            raise DFlashError("an answer is being written", "wait for it, or stop it with Esc")


def _named_file(name: str) -> Path:
    """The file to export to; DFlashError where there is one already or none can be."""
    try:
        file = Path(name).expanduser()
        exists = file.exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user's home, a zero byte
        raise DFlashError(f"there can be no file {name[:80]!r}", "name another file") from None
    if exists:
        raise DFlashError(f"{file} exists already", "name another file")
    return file


def _free_file(title: str) -> Path:
    """A Markdown file in the current folder that does not exist yet."""
    stem = re.sub(r"\W+", "-", title.lower()).strip("-")[:40] or "conversation"
    names = [stem, *(f"{stem}-{n}" for n in range(2, 1000))]
    return next(file for name in names if not (file := Path(f"{name}.md")).exists())
