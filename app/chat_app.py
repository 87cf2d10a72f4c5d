"""The Textual app: what the user does becomes requests, what the worker says becomes the screen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from dflash_chat.backend import Backend
from dflash_chat.bench import BenchRequest
from dflash_chat.commands import COMMANDS, Call, Command, parse
from dflash_chat.conversation import Conversation, Turn
from dflash_chat.draft_panel import DraftPanel
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
from dflash_chat.status import Status, read_progress
from dflash_chat.store import Store
from dflash_chat.terminal import Harmless, when_hung_up
from dflash_chat.themes import THEMES
from dflash_chat.transcript import Transcript
from dflash_chat.welcome import Sample
from dflash_mlx import (
    DEFAULT_MODEL,
    DecodeConfig,
    DFlashError,
    Job,
    Pair,
    PairConfig,
    Request,
    SamplingConfig,
    Worker,
    check_prompt,
    for_terminal,
)

REFRESH = 1 / 20  # seconds between looks at whether something is to be drawn
_LEAVE = 3.0  # seconds that a running pass may take to end when the user leaves


@dataclass(frozen=True)
class Start:
    """What the command line asked for."""

    pair: PairConfig
    decode: DecodeConfig
    chat: ChatConfig


class Said(Message):
    """The worker thread tells of a job."""

    def __init__(self, job: Job, event: object) -> None:
        super().__init__()
        self.job, self.event = job, event


class ChatApp(App[None]):
    """The chat. `run` returns when the user leaves; `clean` says whether the worker ended too."""

    TITLE = "dflash-chat"
    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (150, "-huge")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall"), (28, "-roomy")]
    ENABLE_COMMAND_PALETTE = True
    BINDINGS = [
        Binding("escape", "stop", "Stop", show=False),
        Binding("ctrl+c", "stop_or_copy", "Stop", show=False, priority=True),
        Binding("f2", "call('draft')", "Draft view", show=False),
        Binding("f3", "call('stats')", "Figures", show=False),
    ]

    def __init__(self, start: Start, backend: Backend) -> None:
        super().__init__()
        self.pair_config, self.config = start.pair, start.decode
        self.system, self._resume = start.chat.system, start.chat.resume
        self.store = Store(start.chat.folder)
        self.keeper, self.outbox = Keeper(self.store), Outbox(self)
        self.speeds = SpeedLog(self.store.folder)
        self.conversation = Conversation()
        self.pair: Pair | None = None
        self.clean, self.interrupted = True, False
        self._harmless = Harmless()
        self._backend, self._theme_name = backend, start.chat.theme
        self._unsaved = ""  # why, as it was said last
        self.commands, self.listener = CommandRunner(self), Listener(self)

    def compose(self) -> ComposeResult:
        yield Static(id="header", markup=False)
        with Horizontal(id="middle"):
            yield Transcript()
            yield DraftPanel()
        with Vertical(id="bottom"):
            yield Status()
            prompt = Prompt()
            yield prompt.hint
            yield prompt

    async def on_mount(self) -> None:
        self.screen.set_focus(self.prompt)  # at once, so that no key is lost
        for theme in THEMES.values():
            self.register_theme(theme)
        self.theme = THEMES[self._theme_name].name
        self.worker = Worker(lambda job, event: self.post_message(Said(job, event)))
        self.begin_capture_print(self)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGHUP, signal.SIGTERM):  # the window is closed, the system shuts down
            loop.add_signal_handler(name, self.call_later, self.action_quit)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)  # from elsewhere; the key is bound
        when_hung_up(lambda: self.call_later(self.action_quit))
        self.set_interval(REFRESH, self.listener.tick)
        self.show_header()
        await self.transcript.show(self.conversation.turns)
        self.load(self.pair_config)
        if self._resume:
            await self.resume()

    def _interrupt(self) -> None:
        self.interrupted = True
        self.call_later(self.action_quit)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """What Textual does to every line before it goes to the terminal."""
        return [self._harmless, *super().get_line_filters()]

    def on_unmount(self) -> None:
        self.clean = self.worker.close(_LEAVE)

    @property
    def prompt(self) -> Prompt:
        """The input line."""
        return self.base.query_one(Prompt)

    @property
    def transcript(self) -> Transcript:
        """The conversation on screen."""
        return self.base.query_one(Transcript)

    @property
    def status(self) -> Status:
        """The lines of figures."""
        return self.base.query_one(Status)

    @property
    def draft(self) -> DraftPanel:
        """The draft view."""
        return self.base.query_one(DraftPanel)

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
            await self.say(describe(error), "error")
            return
        if call is None:
            await self.outbox.send(line, text)
        else:
            self.prompt.take_out(line)
            await self._run(call)

    def on_sample_picked(self, message: Sample.Picked) -> None:
        self.prompt.put(message.text)
        self.prompt.focus()

    async def ask(self, text: str) -> None:
        """Put a question to the model; DFlashError for one that cannot be, or not yet."""
        if self.listener.job is not None:
            raise DFlashError("an answer is being written", "wait for it, or stop it with Esc")
        check_prompt(text, self.system, raw=False)
        self.prompt.questions.add(self.prompt.pastes.shorten(text))
        self.conversation.turns.append(Turn("user", text))
        self.status.clear()
        self.draft.begin()
        await self.transcript.begin()
        request = self.request()
        self.listener.answer(self.worker.submit(lambda job: self._backend.answer(request, job)))
        await self.save()

    def race(self, request: Request) -> Job:
        """Decode plainly and with drafts, side by side."""
        return self.worker.submit(lambda job: self._backend.race(request))

    def bench(self, asked: BenchRequest) -> Job:
        """Compare the methods on a dozen prompts."""
        return self.worker.submit(lambda job: self._backend.bench(asked))

    def measure(self) -> Job:
        """Time the passes of the pair, before anybody waits for them."""
        again = self.config.recalibrate
        return self.worker.submit(lambda job: self._backend.measure(again))

    def request(self, extra: str | None = None) -> Request:
        """The conversation so far as a request. extra: a question behind it."""
        messages = list(self.conversation.messages)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if extra:
            messages = [*self.conversation.messages, {"role": "user", "content": extra}]
        if not messages:
            raise DFlashError("nothing has been asked yet", "ask something, or type /race question")
        return Request(tuple(messages), self.system, self.config)

    def load(self, config: PairConfig) -> None:
        """Load another pair, then time its passes."""
        model = None if config.model == DEFAULT_MODEL else config.model
        first, second = config.drafter, config.second_drafter
        config = replace(self.pair_config, model=model, drafter=first, second_drafter=second)
        job = self.worker.submit(lambda job: self._backend.load(config))
        self.listener.expect(config, job)

    async def action_stop(self) -> None:
        await self.listener.stop()

    def copy_to_clipboard(self, text: str) -> None:
        """What is pasted into a terminal later must not command it either."""
        super().copy_to_clipboard(for_terminal(text).encode("utf-8", "replace").decode())

    async def action_stop_or_copy(self) -> None:
        selected = self.screen.get_selected_text() or self.prompt.selected_text
        if selected:
            self.copy_to_clipboard(selected)
        elif (comparing := self.listener.race or self.listener.bench) is not None:
            comparing.action_leave()
        elif self.listener.job is not None:
            await self.listener.stop()
        else:
            self.notify("Ctrl+Q or /quit leaves.")

    async def action_call(self, name: str) -> None:
        await self.call(next(command for command in COMMANDS if command.name == name))

    def action_page(self, direction: int) -> None:
        if direction < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    async def action_quit(self) -> None:
        if self.listener.job is not None:
            self.listener.job.cancelled.set()
            await self.listener.keep_answer("stopped", leaving=True)
        self.exit()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            yield SystemCommand(
                command.usage, command.help, lambda command=command: self._from_palette(command)
            )

    async def call(self, command: Command) -> None:
        """Run a command from a key or the palette; one that needs more goes to the input line."""
        if command.needs_argument:
            self.prompt.put(f"/{command.name} ")
        else:
            await self._run(Call(command, ""))

    async def _run(self, call: Call) -> None:
        try:
            await self.commands.run(call)
        except DFlashError as error:
            await self.say(describe(error), "error")

    def _from_palette(self, command: Command) -> None:
        self.call_later(self.call, command)

    # What the worker says

    async def on_said(self, message: Said) -> None:
        if self.screen_stack:  # else the user has left
            await self.listener.hear(message.job, message.event)

    def on_print(self, event: events.Print) -> None:
        """What the library and the programs it runs print: progress of what takes long."""
        progress = read_progress(event.text)
        if progress is not None and self.listener.waiting and self.screen_stack:
            self.status.progress(progress)

    def read_output(self, text: str) -> None:
        """Take in what was written to file descriptor 2; may be called from any thread."""
        if self.is_running:
            self.post_message(events.Print(text, stderr=True))

    # What follows

    async def say(self, text: str, kind: str = "note") -> None:
        """A sentence in the conversation. kind: "note" or "error"."""
        await self.transcript.notice(text, kind)

    async def save(self) -> None:
        """Save the conversation, an answer in the making included; a problem is said once."""
        if self.pair is not None:
            self.conversation.model = self.pair.target.name
        try:
            await self.keeper.save(self.conversation, *self.listener.unfinished)
            self._unsaved = ""
        except DFlashError as error:
            if str(error) != self._unsaved:
                self._unsaved = str(error)
                await self.say(f"This conversation is not saved: {error}.", "error")

    async def show_conversation(self, conversation: Conversation, problem: str = "") -> None:
        """Put another conversation on screen; a question that was never answered is put back."""
        unanswered = conversation.take_unanswered()
        self.conversation = conversation
        self.prompt.questions.replace(conversation.questions)
        await self.transcript.show(conversation.turns)
        self.draft.begin()
        self.status.clear()
        stored = next((t.figures for t in reversed(conversation.turns) if t.figures), None)
        if stored is not None:
            self.status.show(read_figures(stored))
        if problem:
            await self.say(problem, "error")
        if unanswered is not None:
            self.prompt.put(unanswered)
            await self.say("The last question had no answer yet; Enter sends it again.")
        self.show_header()

    async def resume(self) -> None:
        """Go on with the newest conversation, if there is one."""
        try:
            entries = await asyncio.to_thread(self.store.entries)  # folders can be slow
            entry = next((e for e in entries if not e.damaged), None)
            if entry is not None:
                opened = await asyncio.to_thread(self.store.open, entry.file)
                await self.show_conversation(opened.conversation, opened.problem)
        except DFlashError as error:
            await self.say(str(error), "error")

    def set_sampling(self, sampling: SamplingConfig) -> None:
        """Sample otherwise from the next answer on."""
        self.set_config(replace(self.config, sampling=sampling))

    def set_config(self, config: DecodeConfig) -> None:
        """Decode otherwise from the next answer on."""
        self.config = config
        self.show_header()

    def show_header(self) -> None:
        """The model and how it drafts."""
        pair = pair_line(self.pair, self.config)
        title = self.conversation.shown_title if self.conversation.turns else ""
        line = "  ".join(part for part in ("dflash-chat", pair, title) if part)
        self.base.query_one("#header", Static).update(line)
        self.transcript.welcome.tell(self.pair, self.config, self.speeds)

    def log_speed(self, figures: Figures) -> None:
        """Remember how fast an answer was, for the first screen; aside, because disks are slow."""
        if (pair := self.pair) is not None:
            name = pair.target.name
            self.run_worker(lambda: self.speeds.add(name, figures), thread=True, group="speeds")
