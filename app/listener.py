"""What follows from what the worker says: the life of loads, answers and races on screen."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_chat.aside import aside
from dflash_chat.backend import Loaded
from dflash_chat.conversation import UNFINISHED, Turn
from dflash_chat.pace import Pace
from dflash_chat.problems import describe
from dflash_chat.race_screen import RaceScreen
from dflash_chat.speeds import Timing
from dflash_chat.status import Progress
from dflash_mlx.client import (
    AUTO,
    DEFAULT_MODEL,
    Delta,
    DFlashError,
    Ended,
    Failed,
    Job,
    Pair,
    PairConfig,
    Prefilled,
    family_wanted,
    near_names,
    read_speed,
)

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp

SAVE_EVERY = 1.0  # seconds after which what was said of an answer is saved again


class Listener:
    """Hears the worker for an app, and draws what it said at a pace of its own.

    job: the answer that is being written. waiting: jobs that print their progress. dirty: whether
    something was heard that is not on screen yet.
    """

    def __init__(self, app: ChatApp) -> None:
        self._app = app
        self.job: Job | None = None
        self.waiting: set[Job] = set()
        self.dirty = False
        self._loads: dict[Job, PairConfig] = {}
        self._first: Job | None = None  # that loads what the chat starts with
        self._last: Delta | None = None  # of the answer that is being written
        self._said: list[str] = []  # its text, by rounds
        self._saved, self._saved_at = 0, 0.0  # characters of it on disk, and since when
        self._pace = Pace()

    @property
    def race(self) -> RaceScreen | None:
        """The race on screen, None without one."""
        return next((s for s in self._app.screen_stack if isinstance(s, RaceScreen)), None)

    def expect(self, config: PairConfig, job: Job) -> None:
        """A pair is being loaded."""
        self._first = self._first or job
        self._loads[job] = config
        self.waiting.add(job)
        self._rest()

    def answer(self, job: Job, said: str = "") -> None:
        """An answer is asked for. said: what there is of it already."""
        self.job, self._last = job, None
        self._said, self._saved, self._saved_at = [said], len(said), time.monotonic()
        self._rest()

    async def stop(self) -> None:
        """Stop the answer; one that has not begun yet is taken back at once."""
        if self.job is None:
            return
        self.job.cancelled.set()
        if self.job.begun.is_set():
            self._rest()  # says so at once
        else:
            await self.keep_answer("stopped")

    async def hear(self, job: Job, event: object) -> None:
        """Take in one event; those of answers and races that are over say nothing any more."""
        match event:
            case Loaded():
                self._app.transcript.welcome.memory = event.memory
                await self._loaded(job, event.pair)
            case Timing():
                self._app.transcript.welcome.timing = event
                self._done_waiting(job)
                self._app.show_header()
            case str():
                await self._app.say(f"{event}.")
            case Ended() if job in self.waiting:  # another pair was loaded
                self._done_waiting(job)
            case Failed(error=DFlashError() as error) if job in self._loads:
                error = self._app.user.blamed(error, self._loads[job].model)
                await self._failed(job, describe(error))
            case Failed():
                await self._failed(job, describe(event.error))
            case _ if self.job is job:
                await self._answering(event)
            case _ if self.race is not None and self.race.job is job:
                self.race.take(event)
                self.dirty = True

    async def tick(self) -> None:
        """Draw and save what is new, when it is time."""
        if self.job is not None and time.monotonic() - self._saved_at >= SAVE_EVERY:
            self._saved_at = time.monotonic()
            if (said := sum(map(len, self._said))) > self._saved:
                self._saved = said
                self._app.save()
        if self._app.adapts:
            self._app.learner.tick()
        if self.dirty and self._pace.due(time.perf_counter(), time.thread_time()):
            await self._draw()

    async def keep_answer(self, ending: str, leaving: bool = False) -> None:
        """The answer is over: show and save it. One that says nothing is as if never asked for.

        leaving: the program ends; what was asked stays where it is saved, to be sent another time.
        """
        app, job, self.job = self._app, self.job, None
        self._rest()
        text = await app.transcript.end(ending)
        app.draft.end(text)
        await self._draw()
        failed = ending == "failed"
        if text or not (failed or ending == "stopped"):
            figures = None if failed else app.status.figures
            saved = None if figures is None else dict(figures)
            app.conversation.turns.append(Turn("assistant", text, ending, saved))
            if saved is not None:
                app.log_speed(saved)
        elif not leaving:
            await self._take_back()
            return
        if leaving:
            app.conversation.turns += [Turn("user", text) for text in app.prompt.waiting]
        app.save()
        app.show_header()
        if failed or (job is not None and job.cancelled.is_set()):
            app.outbox.give_back()
        else:
            await app.outbox.go_on()

    @property
    def unfinished(self) -> list[Turn]:
        """The answer in the making as far as it goes, and the questions that wait for its end."""
        if self.job is None:
            return []
        text = "".join(self._said)
        answer = [Turn("assistant", text, UNFINISHED)] if text else []
        return [*answer, *(Turn("user", question) for question in self._app.prompt.waiting)]

    async def _draw(self) -> None:
        self.dirty = False
        self._app.status.draw()
        self._app.draft.draw()
        if self.race is not None:
            self.race.draw()
        await self._app.transcript.draw()

    async def _answering(self, event: object) -> None:
        match event:
            case Prefilled(tokens, total) if total:
                what = f"reading the prompt, {tokens} of {total} tokens"
                self._app.status.progress(Progress(what, tokens / total))
            case Delta():
                await self._take(event)
            case Ended():
                reason = self._last.finish_reason if self._last else None
                await self.keep_answer(reason or "stopped")

    async def _take(self, delta: Delta) -> None:
        """Keep a round for the next drawing; the first is drawn at once."""
        app, first = self._app, self._last is None
        assert app.pair is not None
        app.status.take(delta, app.pair.target.context_length)
        app.draft.take(delta, app.pair.tokenizer)
        app.transcript.receive(delta.text)
        self._said.append(delta.text)
        self._last, self.dirty = delta, True
        if first:
            self._rest()
            await self._draw()

    async def _loaded(self, job: Job, pair: Pair) -> None:
        app = self._app
        app.pair_config = self._loads.pop(job, app.pair_config)
        app.pair = pair
        if job is not self._first:
            names = ("model", "drafter", "second_drafter")
            app.commands.keep({name: lasting(getattr(app.pair_config, name)) for name in names})
        app.config = app.user.advise(app.config, pair.advised)
        self._done_waiting(job)
        again = app.config.recalibrate
        self.waiting.add(app.worker.run(lambda job: app.backend.measure(again), idle=True))
        family = family_wanted(app.config.method)
        if family and not pair.capabilities.count(family):
            app.config = replace(app.config, method=AUTO)
        if app.config.method == AUTO and pair.fallback:
            await app.say(f"{pair.fallback}. /drafter name adds a drafter.")
        for note in pair.notes:
            await app.say(f"{note}.")
        if pair.target.name == DEFAULT_MODEL:
            app.hear(app.worker.call(read_speed), app.commands.offer)
        app.show_header()

    def _done_waiting(self, job: Job) -> None:
        self.waiting.discard(job)
        self._rest()

    def _rest(self) -> None:
        """Nothing to show the progress of, but for an answer that stops or a pair that waits."""
        config = next(iter(self._loads.values()), None)
        what = None if config is None else f"loading {config.model or DEFAULT_MODEL}"
        stopping = self.job is not None and self.job.cancelled.is_set()
        what = "stopping…" if stopping else what
        self.progress(None if what is None else Progress(what))
        self._app.refresh_bindings()

    def progress(self, progress: Progress | None) -> None:
        """Show what is under way, and where a question waits for it."""
        if progress and self._loads and self.job and not self.job.cancelled.is_set():
            progress = replace(progress, what=f"{progress.what}; your question waits for it")
        self._app.status.progress(progress)

    async def _failed(self, job: Job, problem: str) -> None:
        config = self._loads.pop(job, None)
        self._done_waiting(job)
        if config is not None:
            name = config.model or ""  # a search for names like it takes a while
            near = aside(lambda: near_names(name) if name else [])
            self._app.hear(near, lambda near: self._loading_failed(problem, near))
        elif self.job is job:
            await self.keep_answer("failed")
            await self._app.refuse(problem)
        elif self.race is not None and self.race.job is job:
            self.race.end(problem)
        else:
            await self._app.refuse(problem)

    async def _loading_failed(self, problem: str, near: list[str]) -> None:
        pair = self._app.pair
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        stays = f" {pair.target.name} stays loaded." if pair else ""
        await self._app.refuse(f"{problem}.{hint}{stays}")

    async def _take_back(self) -> None:
        """Undo the last question and put it into the input line, unless something is typed.

        Those that wait behind it come back in any case, and then it does, too.
        """
        app = self._app
        question = app.conversation.turns.pop().content
        await app.transcript.show(app.conversation.turns)
        waiting = app.prompt.no_longer_waiting()
        if waiting or not app.prompt.text:
            app.prompt.give_back(question, *waiting)
        app.save()


def lasting(name: str | None) -> str | None:
    """The name of a model as it is known from any folder."""
    here = Path(name).expanduser() if name else None
    return str(here.resolve()) if here is not None and here.exists() else name
