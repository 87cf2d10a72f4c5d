"""What follows from what the worker says: the life of loads, answers and races on screen."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_chat.backend import Loaded, Timed
from dflash_chat.bench import BenchResult
from dflash_chat.bench_screen import BenchScreen
from dflash_chat.conversation import UNFINISHED, Turn
from dflash_chat.pace import Pace
from dflash_chat.problems import describe
from dflash_chat.race import RaceResult, RaceStep
from dflash_chat.race_screen import RaceScreen
from dflash_chat.status import Progress
from dflash_mlx import (
    AUTO,
    DEFAULT_MODEL,
    BenchStep,
    Ended,
    Failed,
    Job,
    Pair,
    PairConfig,
    Prefilled,
    TextDelta,
    near_names,
    needs_drafter,
)

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp

SAVE_EVERY = 1.0  # seconds after which what was said of an answer is saved again


class Listener:
    """Hears the worker for an app, and draws what it said at a pace of its own.

    job: the answer that is being written. race, bench: the one on screen. waiting: jobs that print
    their progress. dirty: whether something was heard that is not on screen yet.
    """

    def __init__(self, app: ChatApp) -> None:
        self._app = app
        self.job: Job | None = None
        self.race: RaceScreen | None = None
        self.bench: BenchScreen | None = None
        self.waiting: set[Job] = set()
        self.dirty = False
        self._loads: dict[Job, PairConfig] = {}
        self._last: TextDelta | None = None  # of the answer that is being written
        self._said: list[str] = []  # its text, by rounds
        self._saved, self._saved_at = 0, 0.0  # characters of it on disk, and since when
        self._pace = Pace()

    def expect(self, config: PairConfig, job: Job) -> None:
        """A pair is being loaded."""
        self._loads[job] = config
        self.waiting.add(job)
        self._rest()

    def answer(self, job: Job) -> None:
        """An answer is asked for."""
        self.job, self._last = job, None
        self._said, self._saved, self._saved_at = [], 0, time.monotonic()

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
            case Timed():
                self._app.transcript.welcome.timing = event.timing
                self._done_waiting(job)
                self._app.show_header()
            case Failed():
                await self._failed(job, describe(event.error))
            case RaceStep() | RaceResult():
                self._raced(job, event)
            case BenchStep() | BenchResult():
                if self.bench is not None and self.bench.job is job:
                    self.bench.take(event)
            case _ if self.job is job:
                await self._answering(event)

    async def tick(self) -> None:
        """Draw and save what is new, when it is time."""
        if self.job is not None and time.monotonic() - self._saved_at >= SAVE_EVERY:
            self._saved_at = time.monotonic()
            self._app.run_worker(self._save_beginning(self.job))
        new = self.dirty or self.race is not None
        if new and self._pace.due(time.perf_counter(), time.thread_time()):
            await self._draw()

    async def keep_answer(self, ending: str, leaving: bool = False) -> None:
        """The answer is over: show and save it. Nothing said at all is as if never asked.

        leaving: the program ends; what was asked stays where it is saved, to be sent another time.
        """
        app, job, self.job = self._app, self.job, None
        self._rest()
        text = await app.transcript.end(ending)
        await self._draw()
        said = text or ending != "stopped"
        figures = app.status.figures if said else None
        saved = None if figures is None else dict(figures)
        if said:
            app.conversation.turns.append(Turn("assistant", text, ending, saved))
        elif not leaving:
            await self._take_back()
            return
        if leaving:
            app.conversation.turns += [Turn("user", text) for text in app.prompt.waiting]
        await app.save()
        if saved is not None:
            app.log_speed(saved)
        app.show_header()
        if job is not None and job.cancelled.is_set():
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

    async def _save_beginning(self, job: Job) -> None:
        """Save what was said so far; neither the worker nor the screen waits for the disk."""
        said = sum(map(len, self._said))
        if self.job is job and said > self._saved and not self._app.keeper.busy:
            self._saved = said
            await self._app.save()

    async def _draw(self) -> None:
        self.dirty = False
        self._app.status.draw()
        self._app.draft.draw()
        if self.race is not None:
            self.race.draw()
        await self._app.transcript.draw()
        self._app.transcript.tint(self._app.draft.tinted())

    async def _answering(self, event: object) -> None:
        """News of the answer that is being written."""
        match event:
            case Prefilled(tokens, total) if total:
                what = f"reading the prompt, {tokens} of {total} tokens"
                self._app.status.progress(Progress(what, tokens / total))
            case TextDelta():
                await self._take(event)
            case Ended():
                reason = self._last.finish_reason if self._last else None
                await self.keep_answer(reason or "stopped")

    async def _take(self, delta: TextDelta) -> None:
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
        """Show the pair, then let it be measured."""
        app = self._app
        app.pair_config = self._loads.pop(job, app.pair_config)
        app.pair = pair
        self._done_waiting(job)
        self.waiting.add(app.measure())
        if needs_drafter(app.config.method) and not pair.means.drafters:
            app.config = replace(app.config, method=AUTO)
        if app.config.method == AUTO and pair.fallback:
            await app.say(f"{pair.fallback}. /drafter name adds a drafter.")
        for note in pair.notes:
            await app.say(f"{note}.")
        app.show_header()

    def _done_waiting(self, job: Job) -> None:
        self.waiting.discard(job)
        self._rest()

    @property
    def _stopping(self) -> bool:
        return self.job is not None and self.job.cancelled.is_set()

    def _rest(self) -> None:
        """Nothing to show the progress of, but for an answer that stops or a pair that waits."""
        config = next(iter(self._loads.values()), None)
        what = None if config is None else f"loading {config.model or DEFAULT_MODEL}"
        what = "stopping…" if self._stopping else what
        self._app.status.progress(None if what is None else Progress(what))

    def _raced(self, job: Job, event: RaceStep | RaceResult) -> None:
        if self.race is None or self.race.job is not job:
            return
        if isinstance(event, RaceStep):
            self.race.take(event)
        else:
            self.race.finish(event)

    async def _failed(self, job: Job, problem: str) -> None:
        config = self._loads.pop(job, None)
        self._done_waiting(job)
        if config is not None and config.model is not None:  # a search for near names takes a while
            self._app.run_worker(self._loading_failed(config, problem))
        elif config is not None:
            await self._loading_failed(config, problem)
        elif self.job is job:
            await self._answer_failed(problem)
        elif self.race is not None and self.race.job is job:
            self.race.fail(problem)
        elif self.bench is not None and self.bench.job is job:
            self.bench.fail(problem)
        else:
            await self._app.say(problem, "error")

    async def _loading_failed(self, config: PairConfig, problem: str) -> None:
        app = self._app
        near = await asyncio.to_thread(near_names, config.model) if config.model else []
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        stays = f" {app.pair.target.name} stays loaded." if app.pair else ""
        await app.say(f"{problem}.{hint}{stays}", "error")

    async def _answer_failed(self, problem: str) -> None:
        """Keep what was said; a question without any answer goes back into the input line."""
        app = self._app
        self.job = None
        self._rest()
        text = await app.transcript.end("failed")
        if text:
            app.conversation.turns.append(Turn("assistant", text, "failed"))
            await app.save()
            app.outbox.give_back()
        else:
            await self._take_back()
        await app.say(problem, "error")

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
        await app.save()
