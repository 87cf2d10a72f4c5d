"""What each slash command does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.binding import Binding

from dflash_chat.aside import aside
from dflash_chat.commands import COMMANDS, Call
from dflash_chat.conversation import LONGEST_TITLE, UNFINISHED, Conversation, code_blocks
from dflash_chat.download_screen import DownloadScreen
from dflash_chat.draft_panel import DraftPanel
from dflash_chat.figures import MEANINGS, counted, statistics_rows
from dflash_chat.open_screen import OpenScreen
from dflash_chat.picker_screen import PickerScreen, first_offer
from dflash_chat.prompt import Prompt
from dflash_chat.race_screen import RaceScreen
from dflash_chat.screens import RowsScreen, confirm, when_given
from dflash_chat.settings_screen import SettingsScreen, changes
from dflash_chat.share import card, share
from dflash_chat.store import Opened, export
from dflash_chat.themes import THEMES
from dflash_mlx.client import (
    HERE,
    AvailableModel,
    DecodeConfig,
    DFlashError,
    PairConfig,
    Question,
    amount,
    bare,
    check_given,
    method_choices,
    read_speed,
    settle,
)

USUAL = 2.0  # the highest temperature at which answers still make sense

_CUT = "stopped", "length", "failed", UNFINISHED  # endings of answers that may go on
_IF_ALLOWED = ", if this terminal lets programs copy (Terminal.app does not; /export writes a file)"

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp


class CommandRunner:
    """Runs commands on an app: each is a method `_name` that takes what was typed behind it."""

    def __init__(self, app: ChatApp) -> None:
        self._app = app

    async def run(self, call: Call) -> None:
        """Run one command; DFlashError where it cannot be done."""
        await getattr(self, f"_{call.command.name}")(call.argument)

    def set_config(self, config: DecodeConfig, keep: bool = False) -> None:
        """Decode otherwise from the next answer on. keep: and from the next start on."""
        changed = changes(self._app.config, config)
        self._app.user.origins |= dict.fromkeys(changed, HERE)
        self._app.config = config
        self._app.show_header()
        if keep:
            self.keep(changed)

    def keep(self, changed: Mapping[str, object]) -> None:
        """Write choices into the user's file, and say so; aside, because disks are slow."""
        app = self._app
        kept = app.keeper.ask(lambda _: app.user.keep(changed))
        app.hear(kept, lambda said: app.say(said) if said else None)

    async def _model(self, name: str) -> None:
        if name:
            self._app.load(PairConfig(model=name))
        else:
            picker = PickerScreen(self._app.worker.call(read_speed))
            self._app.push_screen(picker, when_given(self._app.load))

    def offer(self, read_speed: float) -> None:
        """Where nobody has talked yet: tell once of a better model than the default one."""
        app = self._app

        def tell(best: AvailableModel | None) -> None:
            if best is not None:
                what = f"{best.short}, recommended for this machine ({amount(best.download)})"
                app.transcript.welcome.offer(f"Ctrl+N fetches and starts {what}; later: /model")
                app.bind("ctrl+n", f"fetch('{best.name}')", description=f"get {best.short}")

        if app.transcript.welcome.display and app.pair_config.model is None:
            app.hear(aside(lambda: first_offer(app.store.folder, read_speed)), tell)

    def fetch(self, name: str) -> None:
        screen = DownloadScreen(PairConfig(name), start=True)
        self._app.push_screen(screen, when_given(self._app.load))

    async def _drafter(self, name: str) -> None:
        self._app.load(replace(self._app.pair_config, drafter=name))

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
            self.set_config(config)
        here = "" if app.pair is None else settle(app.config, app.pair.capabilities).method
        chosen = f", which is {here} with this model" if here not in ("", app.config.method) else ""
        await app.say(f"The method is {app.config.method}{chosen}.")

    async def _temperature(self, text: str) -> None:
        app = self._app
        if text:
            try:
                value = float(text)
            except ValueError:
                what = f"temperature is {text!r}"
                raise DFlashError(what, "type a number, 0 is greedy") from None
            sampling = replace(app.config.sampling, temperature=value)
            self.set_config(replace(app.config, sampling=sampling))
        value = app.config.sampling.temperature
        noise = "" if value <= USUAL else " Answers will be noise; models are used at 0 to 1."
        await app.say(f"The temperature is {value:g}.{noise}")

    async def _system(self, text: str) -> None:
        app = self._app
        if text:
            app.system = None if text == "-" else text
        await app.say(f"The system prompt is: {app.system}" if app.system else "No system prompt.")

    async def _settings(self, _: str) -> None:
        app = self._app
        keep = when_given(partial(self.set_config, keep=True))
        app.push_screen(SettingsScreen(app.config, app.user.origins), keep)

    async def _race(self, text: str) -> None:
        app = self._app
        self._need_idle()
        if app.listener.race is not None:  # the palette opens over a race, too
            raise DFlashError("a race is being run", "leave it with Esc first")
        request = app.request(text or None)
        job = app.worker.run(lambda job: app.backend.race(request))
        earlier = None if text else app.status.figures
        expected = earlier["generated_tokens"] if earlier else request.config.max_tokens
        app.push_screen(RaceScreen(job, expected))

    async def _draft(self, _: str) -> None:
        panel = self._app.draft
        panel.display = not panel.display
        self._app.base.set_class(panel.display, "-draft")
        panel.draw()
        self._app.transcript.tint(panel.tokens_of if panel.display else None)

    async def _stats(self, _: str) -> None:
        status = self._app.status
        if (figures := status.figures) is None:
            raise DFlashError("there is no answer yet", "ask something first")
        rows = [(*row, MEANINGS.get(row[0], "")) for row in statistics_rows(figures)]
        self._app.push_screen(RowsScreen("The last answer", rows))

    async def _retry(self, _: str) -> None:
        app = self._app

        async def ask(question: str) -> None:
            try:
                await app.ask(question)
            except DFlashError:
                app.prompt.give_back(question)  # what the model refuses is not lost
                raise
            if app.config.sampling.temperature == 0:
                await app.say("The answer will be the same again; /temperature 0.7 gives others.")

        self._branch(ask)

    async def _continue(self, _: str) -> None:
        self._need_idle()
        app, talk = self._app, self._app.conversation
        if not talk.turns:
            raise DFlashError("there is no answer yet", "ask something first")
        if talk.turns[-1].ending not in _CUT:
            what = "the last answer is whole, and only the last one can go on"
            raise DFlashError(what, "ask something, or type /retry")
        request = Question((*talk.messages,), app.system, app.config, app.album)
        said = talk.turns.pop().content
        await app.transcript.show(talk.turns)
        await app.answer(request, said)

    async def _edit(self, _: str) -> None:
        app, old = self._app, self._app.conversation

        async def edit(question: str) -> None:
            if not (app.conversation.turns or old.title):
                app.conversation.title = ""  # its first question names it
                app.show_header()
            app.prompt.give_back(question)
            kept = "" if old.private else "The conversation as it was is in /open; "
            await app.say(f"{kept}Enter asks this one.")

        self._branch(edit)

    def _branch(self, then: Callable[[str], Awaitable[None]]) -> None:
        """Keep the conversation as it is, and call `then` with its last question in one before."""
        self._need_idle()
        app, old = self._app, self._app.conversation
        if not old.questions:
            raise DFlashError("nothing has been asked yet", "ask something first")

        async def kept(_: bool) -> None:
            self._need_idle()  # a folder takes its time, and meanwhile more may have been asked
            if app.conversation is old:
                await app.show_conversation(old.before_last_question())
                await then(old.questions[-1])

        app.hear(app.keeper.save(old), kept)

    async def _copy(self, number: str) -> None:
        app, answer = self._app, self._app.conversation.last_answer
        if answer is None:
            raise DFlashError("there is no answer yet", "ask something first")
        blocks = {str(n): text for n, text in enumerate(code_blocks(answer), start=1)}
        if number == "code" and blocks:
            number = str(len(blocks))
        if number not in ("", *blocks):
            count = counted(len(blocks), "code block")
            way = "type /copy 1 for the first, or" if blocks else "type"
            what = f"the last answer has {count}, and none is {number[:20]!r}"
            raise DFlashError(what, f"{way} /copy alone")
        text = blocks.get(number, answer)
        app.copy_to_clipboard(text)
        what = f"code block {number}" if number else "the last answer"
        unsure = "" if app.surely_copied else _IF_ALLOWED
        await app.say(f"Copied {what}, {len(text):,} characters{unsure}.")

    async def _new(self, _: str) -> None:
        self._need_idle()
        await self._app.show_conversation(Conversation())

    async def _incognito(self, _: str) -> None:
        self._need_idle()
        await self._app.show_conversation(Conversation(private=True))

    async def _forget(self, _: str) -> None:
        self._app.forget()
        await self._app.say("What was read and said before no longer helps; /open has the texts.")

    async def _open(self, _: str) -> None:
        self._need_idle()
        app, screen = self._app, OpenScreen(self._app.keeper)

        async def chosen(file: Path | None) -> None:
            if None in screen.titles.values():  # deleted there
                app.forget()
            if file is not None:
                app.hear(app.keeper.ask(lambda store: store.open(file)), self._opened)
                return
            known = screen.titles.items()  # the one on screen was perhaps renamed or deleted there
            for title in (t for f, t in known if f == app.store.file_of(app.conversation)):
                if title is None:
                    await app.show_conversation(Conversation())
                else:
                    app.conversation.title = title
                    app.show_header()

        app.push_screen(screen, chosen)

    async def _opened(self, opened: Opened) -> None:
        self._need_idle()  # the palette can begin an answer below the list
        await self._app.show_conversation(opened.conversation, opened.problem)

    async def _rename(self, title: str) -> None:
        self._app.conversation.title = title[:LONGEST_TITLE]
        self._app.save()
        self._app.show_header()

    async def _delete(self, _: str) -> None:
        self._need_idle()
        self._need_words("delete")
        app, conversation = self._app, self._app.conversation

        async def gone(_: None) -> None:
            app.forget()
            self._need_idle()
            if app.conversation is conversation:
                await app.show_conversation(Conversation())

        question = f"Delete “{conversation.shown_title}” for good?"
        confirm(app, question, lambda: app.hear(app.keeper.delete(conversation), gone))

    async def _export(self, name: str) -> None:
        app = self._app
        self._need_words("export")
        conversation = replace(app.conversation, turns=[*app.conversation.turns])
        written = aside(lambda: export(conversation, name))
        app.hear(written, lambda file: app.say(f"Written to {file}."))

    async def _share(self, name: str) -> None:
        app, talk = self._app, self._app.conversation
        last = max((i for i, turn in enumerate(talk.turns) if turn.role != "user"), default=None)
        if last is None:
            raise DFlashError("there is no answer yet", "ask something first")
        answer, title, colours = talk.turns[last], talk.shown_title, dict(app.theme_variables)
        tokens = app.draft.pieces_of(answer.content)
        shown = partial(card, bare(talk.turns[last - 1].content), answer, tokens, talk.model)
        app.hear(aside(lambda: share(shown(), name, title, colours)), app.say)

    async def _theme(self, name: str) -> None:
        name = name or ("light" if self._app.current_theme.dark else "dark")
        if name not in THEMES:
            raise DFlashError(f"theme is {name!r}", f"choose one of {', '.join(THEMES)}")
        self._app.theme = THEMES[name].name
        self.keep({"theme": name})

    async def _help(self, _: str) -> None:
        app = self._app
        rows = [*((command.usage, command.help) for command in COMMANDS), ("", "")]
        for bound in [*Prompt.BINDINGS, *app.BINDINGS, *DraftPanel.BINDINGS]:
            if isinstance(bound, Binding) and (does := bound.tooltip or bound.description):
                first = replace(bound, key=bound.key.partition(",")[0])
                rows.append((app.get_key_display(first), does))
        app.push_screen(RowsScreen("dflash-chat", rows))

    async def _quit(self, _: str) -> None:
        await self._app.action_quit()

    def _need_idle(self) -> None:
        if self._app.listener.job is not None:
            raise DFlashError("an answer is being written", "wait for it, or stop it with Esc")

    def _need_words(self, action: str) -> None:
        if not self._app.conversation.turns:
            raise DFlashError(f"there is nothing to {action} yet", "ask something first")
