"""The Textual app: what the user does becomes requests, what the worker says becomes the screen."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from rich.traceback import Traceback
from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import Footer, Static

from dflash_chat.adapting import Learner
from dflash_chat.aside import Asks
from dflash_chat.backend import Backend
from dflash_chat.clipboard import copied
from dflash_chat.commands import COMMANDS, Call, parse
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.draft_panel import DraftPanel
from dflash_chat.fields import as_typed
from dflash_chat.figures import Figures, read_figures
from dflash_chat.keeper import Keeper
from dflash_chat.listener import Listener
from dflash_chat.naming import pair_line
from dflash_chat.options import ChatConfig
from dflash_chat.outbox import Outbox
from dflash_chat.problems import describe
from dflash_chat.prompt import Prompt
from dflash_chat.runner import CommandRunner
from dflash_chat.speeds import SpeedLog
from dflash_chat.status import Progress, Status, read_progress
from dflash_chat.store import Opened, Store, newest
from dflash_chat.terminal import Harmless, when_hung_up
from dflash_chat.themes import DARK, THEMES
from dflash_chat.transcript import Transcript
from dflash_mlx.client import (
    DEFAULT_MODEL,
    Album,
    DecodeConfig,
    DFlashError,
    News,
    Pair,
    PairConfig,
    Question,
    UserConfig,
    Worker,
    check_prompt,
    for_terminal,
)

MAC = sys.platform == "darwin"
_NUMBERS = {"ctrl+t": "F2", "ctrl+g": "F3", "ctrl+r": "F4"}
REFRESH = 1 / 20  # seconds between looks at whether something is to be drawn
_LEAVE = 3.0  # seconds that a running pass may take to end when the user leaves
_SAVE = 2.0  # seconds that a folder may take then


class ChatApp(Asks, App[None], inherit_bindings=False):
    """The chat, as the command line asked for it. `run` returns when the user leaves.

    clean: whether the worker ended, too. left: a sentence about what could not be saved, "" for
    nothing. saved_as: the title of the conversation that was saved, "" for none.
    """

    TITLE = "dflash-chat"
    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (150, "-huge")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall"), (28, "-roomy")]
    BINDINGS = [
        Binding("escape", "stop", "stop", tooltip="stop the answer, keeping what was said"),
        Binding("ctrl+c", "stop_or_copy", "stop, copy what is marked", show=False, priority=True),
        Binding("ctrl+t,f2", "call('draft')", "who guessed", id="draft"),
        Binding("ctrl+g,f3", "call('stats')", "figures", id="stats"),
        Binding("ctrl+o", "call('copy', 'code')", "copy code", id="copy"),
        Binding("ctrl+q", "quit", "leave", priority=True),
        Binding("ctrl+r,f4", "call('race')", "race", id="race"),
    ]

    def __init__(
        self, pair: PairConfig, decode: DecodeConfig, chat: ChatConfig, backend: Backend
    ) -> None:
        super().__init__()
        self.config, self.backend, self._chat = decode, backend, chat
        self.pair_config = replace(pair, adapted=pair.adapted or chat.adapt)
        self.system, self.store = chat.system, Store(chat.folder)
        self.keeper, self.outbox, self.album = Keeper(self.store), Outbox(self), Album()
        self.speeds = SpeedLog(self.store.folder)
        self.conversation = Conversation()
        self.pair: Pair | None = None
        self.clean, self.interrupted, self.left, self.saved_as = True, False, "", ""
        self._harmless = Harmless()
        self.first, self.user = "", UserConfig()  # a question to begin with, and where choices go
        self.surely_copied = False  # the last copy, by a program of this machine
        self._unsaved = ""  # why, as it was said last
        self.commands, self.listener = CommandRunner(self), Listener(self)
        self.learner, self.adapts = Learner(self), chat.adapt
        for theme in THEMES.values():
            self.register_theme(theme)
        self.theme = THEMES.get(chat.theme, DARK).name

    def compose(self) -> ComposeResult:
        self.header = Static(id="header", markup=False)
        self.transcript, self.draft = Transcript(), DraftPanel()
        self.status, self.prompt = Status(), Prompt()
        yield self.header
        with Horizontal(id="middle"):
            yield self.transcript
            yield self.draft
        with Vertical(id="bottom"):
            yield self.status
            yield self.prompt.hint
            yield self.prompt.choices
            yield self.prompt
        yield Footer(compact=True)

    async def on_mount(self) -> None:
        self.screen.set_focus(self.prompt)  # at once, so that no key is lost
        self.worker = Worker(self._post)
        self.begin_capture_print(self)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGHUP, signal.SIGTERM):  # the window is closed, the system shuts down
            loop.add_signal_handler(name, self.call_later, self.action_quit)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)  # from elsewhere; the key is bound
        when_hung_up(lambda: self.call_later(self.action_quit))
        self.set_interval(REFRESH, self.listener.tick)
        self.show_header()
        await self.transcript.show(self.conversation.turns)
        if self.user.problem:
            await self.refuse(self.user.problem)
        self.load(self.pair_config)
        self.prompt.put(self.first)
        if self._chat.resume:
            self.hear(self.keeper.ask(newest), self._resumed)
        else:
            self._ask_first()

    def _ask_first(self) -> None:
        """Send the command line's question, unless an unanswered one was put before it."""
        if self.first:
            line = self.prompt.pastes.shorten(self.first)
            self.call_later(self.on_prompt_sent, Prompt.Sent(self.first, line))

    def _interrupt(self) -> None:
        self.interrupted = True
        self.call_later(self.action_quit)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """What Textual does to every line before it goes to the terminal."""
        return [self._harmless, *super().get_line_filters()]

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste):
            self.learner.stop()
        await super().on_event(as_typed(event))

    def on_unmount(self) -> None:
        self.clean = self.worker.close(_LEAVE, self.backend.leave)

    @property
    def base(self) -> Screen[object]:
        """The chat itself, whatever lies over it."""
        return self.screen_stack[0]

    # What the user does

    async def on_prompt_sent(self, message: Prompt.Sent) -> None:
        if message.line and not self.prompt.text.startswith(message.line):
            return  # Enter came twice, and the line was sent the first time
        line = message.line or message.text
        text = self.transcript.welcome.question(message.text)
        if not text.strip():
            return
        try:
            call = parse(text)
        except DFlashError as error:
            self.prompt.select_all()  # what is typed next takes its place
            await self.complain(error)
            return
        try:
            if call is None:
                await self.outbox.send(line, text)
            else:
                self.prompt.take_out(line)
                await self.commands.run(call)
        except DFlashError as error:
            await self.complain(error)

    async def ask(self, text: str) -> None:
        """Put a question to the model; DFlashError for one that cannot be, or not yet."""
        if self.listener.job is not None:
            raise DFlashError("an answer is being written", "wait for it, or stop it with Esc")
        check_prompt(text, self.system, raw=False)
        self.prompt.questions.add(self.prompt.pastes.shorten(text))
        self.conversation.turns.append(Turn("user", text))
        await self.answer(self.request())

    async def answer(self, request: Question, said: str = "") -> None:
        """Let the model answer, or write on where an answer of which so much was said ends."""
        self.status.clear()
        self.draft.begin(said)
        await self.transcript.begin(said)
        answer = partial(self.backend.answer, request, private=self.conversation.private)
        self.listener.answer(self.worker.run(answer), said)
        self.save()

    def request(self, extra: str | None = None) -> Question:
        """The conversation so far as a request. extra: a question behind it."""
        messages = [*self.conversation.messages]
        if extra:
            messages.append({"role": "user", "content": extra})
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise DFlashError("nothing has been asked yet", "ask something, or type /race question")
        return Question(tuple(messages), self.system, self.config, self.album)

    def load(self, config: PairConfig) -> None:
        """Load another pair, then time its passes."""
        model = None if config.model == DEFAULT_MODEL else config.model
        first, second = config.drafter, config.second_drafter
        config = replace(self.pair_config, model=model, drafter=first, second_drafter=second)
        self.listener.expect(config, self.worker.run(lambda job: self.backend.load(config)))

    def forget(self) -> None:
        """Keep nothing of what was read and said, but for the conversations themselves."""
        self.album.clear()
        self.worker.run(lambda job: self.backend.forget())

    def action_fetch(self, name: str) -> None:
        self.commands.fetch(name)

    def get_key_display(self, binding: Binding) -> str:
        """What the footer calls a key: letters alone on a MacBook, which keeps F2 to F4."""
        letter, number = super().get_key_display(binding), _NUMBERS.get(binding.key)
        return f"{number}/{letter}" if number and not MAC else letter

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What Textual asks before it runs an action or names its key below."""
        idle, talk = self.listener.job is None, self.conversation.turns
        needs = {
            "stop": not idle,
            "stats": self.status.figures is not None,
            "race": idle and bool(talk),
            "copy": any("```" in turn.content for turn in talk[-2:] if turn.role != "user"),
        }
        return needs.get(str(parameters[0] if action == "call" else action), True)

    async def action_stop(self) -> None:
        await self.listener.stop()

    def copy_to_clipboard(self, text: str) -> None:
        """What is pasted into a terminal later must not command it either."""
        safe = for_terminal(text).encode("utf-8", "replace").decode()
        self.surely_copied = copied(safe)
        if not self.surely_copied:
            super().copy_to_clipboard(safe)

    async def action_stop_or_copy(self) -> None:
        selected = self.screen.get_selected_text() or self.prompt.selected_text
        if selected:
            self.copy_to_clipboard(selected)
        elif self.listener.race is not None:
            self.listener.race.action_leave()
        elif self.listener.job is not None:
            await self.listener.stop()
        else:
            self.notify("Ctrl+Q or /quit leaves.")

    def action_page(self, way: str) -> None:
        getattr(self.transcript, f"scroll_page_{way}")(animate=False)

    async def action_quit(self) -> None:
        """Leave, as soon as all is saved, or without that where a folder hangs."""
        if self.listener.job is not None:
            self.listener.job.cancelled.set()
            await self.listener.keep_answer("stopped", leaving=True)
        elif self.keeper.unsaved:
            self.save()
        self.status.progress(Progress("saving …"))
        in_time = await self.keeper.finish(_SAVE)
        if titles := self.keeper.unsaved:
            why = self.keeper.problem if in_time else f"{self.store.folder} does not answer"
            self.left = f"{' and '.join(titles)} could not be saved: {why}"
        elif self.conversation.turns and not self.conversation.private:
            self.saved_as = for_terminal(self.conversation.shown_title)
        self.exit()

    def _fatal_error(self) -> None:
        """As Textual's, but without what variables hold: a log does not tell what was said."""
        self.panic(Traceback())

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            run = partial(self.call_later, self.action_call, command.name)
            yield SystemCommand(command.usage, command.help, run)

    async def action_call(self, name: str, argument: str = "") -> None:
        """Run a command from a key or the palette; one that needs more goes to the input line."""
        command = next(each for each in COMMANDS if each.name == name)
        if command.needs_argument:
            self.prompt.put(f"/{command.name} ")
            return
        try:
            await self.commands.run(Call(command, argument))
        except DFlashError as error:
            await self.complain(error)

    # What the worker says

    def _post(self, news: News) -> None:
        """On the worker's thread."""
        for job, event in news:
            self.call_later(self.listener.hear, job, event)

    def on_print(self, event: events.Print) -> None:
        """What the library and the programs it runs print: progress of what takes long."""
        progress = read_progress(event.text)
        if progress is not None and self.listener.waiting and self.screen_stack:
            self.listener.progress(progress)

    def read_output(self, text: str) -> None:
        """Take in what was written to file descriptor 2; may be called from any thread."""
        if self.is_running:
            self.post_message(events.Print(text, stderr=True))

    # What follows

    async def say(self, text: str, kind: str = "note") -> None:
        """A sentence in the conversation. kind: "note" or "error"."""
        await self.transcript.notice(text, kind)

    async def complain(self, error: DFlashError) -> None:
        await self.refuse(describe(error))

    async def refuse(self, problem: str) -> None:
        await self.say(problem, "error")

    def save(self) -> None:
        """Save the conversation, an answer in the making included; a problem is said once."""
        if self.pair is not None:
            self.conversation.model = self.pair.target.name
        saved = self.keeper.save(self.conversation, *self.listener.unfinished)
        self.hear(saved, self._saved, self._not_saved)

    def _saved(self, copied: bool) -> None:
        self._unsaved = ""
        if copied:
            self.show_header()

    async def _not_saved(self, problem: str) -> None:
        if problem != self._unsaved:
            self._unsaved = problem
            await self.refuse(f"This conversation is not saved: {problem}.")

    async def show_conversation(self, conversation: Conversation, problem: str = "") -> None:
        """Put another conversation on screen; a question that was never answered is put back."""
        unanswered = conversation.take_unanswered()
        if self.conversation.private and not conversation.private:
            self.album.clear()
        self.conversation = conversation
        self.prompt.questions.replace(conversation.questions)
        await self.transcript.show(conversation.turns)
        self.draft.begin()
        self.status.clear()
        if stored := next((t.figures for t in reversed(conversation.turns) if t.figures), None):
            self.status.show(read_figures(stored))
        if problem:
            await self.refuse(problem)
        if unanswered is not None:
            self.prompt.give_back(unanswered)
            await self.say("The last question had no answer yet; Enter sends it again.")
        self.show_header()

    async def _resumed(self, opened: Opened | None) -> None:
        """Go on with the newest conversation, unless there is none, or another one by now."""
        if opened is not None and not self.conversation.turns:
            await self.show_conversation(opened.conversation, opened.problem)
        self._ask_first()

    def show_header(self) -> None:
        """The model and how it drafts; the title, unless it is the question that stands below."""
        pair, talk = pair_line(self.pair, self.config), self.conversation
        title = talk.shown_title if talk.title or talk.turns[2:] else ""
        kept = "incognito: nothing of this is kept" if talk.private else ""
        self.header.update("  ".join(part for part in ("dflash-chat", pair, kept, title) if part))
        self.refresh_bindings()
        self.transcript.welcome.tell(self.pair, self.config, self.speeds)

    def log_speed(self, figures: Figures) -> None:
        """Remember how fast an answer was, for the first screen; aside, because disks are slow."""
        if (pair := self.pair) is not None:
            self.keeper.ask(lambda _: self.speeds.add(pair.target.name, figures))
