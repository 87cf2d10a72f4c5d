"""What each slash command does."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_chat.bench import BenchRequest
from dflash_chat.bench_screen import BenchScreen
from dflash_chat.commands import Call, help_rows
from dflash_chat.conversation import LONGEST_TITLE, Conversation, code_blocks
from dflash_chat.figures import explained, statistics_rows
from dflash_chat.open_screen import OpenScreen
from dflash_chat.picker_screen import PickerScreen
from dflash_chat.race_screen import RaceScreen
from dflash_chat.screens import ConfirmScreen, RowsScreen
from dflash_chat.settings_screen import SettingsScreen
from dflash_chat.store import export
from dflash_chat.themes import THEMES
from dflash_mlx import DecodeConfig, DFlashError, PairConfig, check_given, method_choices, settle

USUAL = 2.0  # the highest temperature at which answers still make sense

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
            config = replace(app.config, method=name)
            try:
                check_given(config)
            except DFlashError as error:
                step = "change that in /settings, or choose another method"
                raise DFlashError(error.what, step, error.setting) from None
            app.set_config(config)
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
        value = app.config.sampling.temperature
        noise = "" if value <= USUAL else " Answers will be noise; models are used at 0 to 1."
        await app.say(f"The temperature is {value:g}.{noise}")

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
        self._need_no_comparison()
        app.listener.race = RaceScreen(app.race(app.request(text or None)))
        app.push_screen(app.listener.race, self._race_left)

    async def _bench(self, methods: str) -> None:
        app = self._app
        self._need_no_comparison()
        names = tuple(name.strip() for name in methods.split(",") if name.strip())
        folder = app.store.folder / "benchmarks"
        asked = BenchRequest(app.pair_config, app.config.sampling, names, folder)
        app.listener.bench = BenchScreen(app.bench(asked), app.pair)
        app.push_screen(app.listener.bench, self._bench_left)

    def _bench_left(self, _: None) -> None:
        self._app.listener.bench = None

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

    async def _retry(self, _: str) -> None:
        app, question = self._app, await self._branch()
        try:
            await app.ask(question)
        except DFlashError:
            app.prompt.give_back(question)  # what the model refuses is not lost
            raise
        if app.config.sampling.temperature == 0:
            await app.say("The answer will be the same again; /temperature 0.7 gives others.")

    async def _edit(self, _: str) -> None:
        app, old = self._app, self._app.conversation
        question = await self._branch()
        if not (app.conversation.turns or old.title):
            app.conversation.title = ""  # its first question names it
            app.show_header()
        app.prompt.give_back(question)
        await app.say("The conversation as it was is in /open; Enter asks this one.")

    async def _branch(self) -> str:
        """Leave the conversation as it is for one that ends before its last question: that one."""
        self._need_idle()
        app, old = self._app, self._app.conversation
        if not old.questions:
            raise DFlashError("nothing has been asked yet", "ask something first")
        await app.keeper.save(old)
        await app.show_conversation(old.before_last_question())
        return old.questions[-1]

    async def _copy(self, number: str) -> None:
        app, answer = self._app, self._app.conversation.last_answer
        if answer is None:
            raise DFlashError("there is no answer yet", "ask something first")
        blocks = {str(n): text for n, text in enumerate(code_blocks(answer), start=1)}
        if number not in ("", *blocks):
            count = f"{len(blocks)} code block{'' if len(blocks) == 1 else 's'}"
            numbers = "1" if len(blocks) == 1 else f"1 to {len(blocks)}"
            ways = f"type /copy {numbers}, or" if blocks else "type"
            raise DFlashError(
                f"the last answer has {count}, and none is {number[:20]!r}", f"{ways} /copy alone"
            )
        text = blocks.get(number, answer)
        app.copy_to_clipboard(text)
        what = f"code block {number}" if number else "the last answer"
        await app.say(
            f"Copied {what}, {len(text):,} characters, if this terminal lets programs copy "
            "(Terminal.app does not; /export writes a file)."
        )

    async def _new(self, _: str) -> None:
        self._need_idle()
        await self._app.show_conversation(Conversation())

    async def _open(self, _: str) -> None:
        self._need_idle()
        stored = await asyncio.to_thread(self._app.store.holds, self._app.conversation)
        screen = OpenScreen(self._app.store)
        self._app.push_screen(screen, lambda file: self._opened(file, stored))

    async def _opened(self, file: Path | None, stored: bool) -> None:
        """stored: whether the conversation on screen was in the list."""
        app = self._app
        try:
            if file is not None:
                self._need_idle()  # the palette can begin an answer below the list
                opened = await asyncio.to_thread(app.store.open, file)
                await app.show_conversation(opened.conversation, opened.problem)
            elif stored:
                await self._closed_list()
        except DFlashError as error:
            await app.say(str(error), "error")

    async def _closed_list(self) -> None:
        """The conversation on screen may have been renamed or deleted in the list."""
        app = self._app
        if await asyncio.to_thread(app.store.holds, app.conversation):
            stored = await asyncio.to_thread(app.store.read, app.store.file_of(app.conversation))
            app.conversation.title = stored.conversation.title
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
            self._need_idle()
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

    def _need_no_comparison(self) -> None:
        """The palette opens over a race or a benchmark, too."""
        self._need_idle()
        if self._app.listener.race is not None or self._app.listener.bench is not None:
            raise DFlashError("a comparison is being run", "leave it with Esc first")


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
