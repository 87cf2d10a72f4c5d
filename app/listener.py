"""What follows from what the engine says: the life of loads, answers and races on screen."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_chat.conversation import Turn
from dflash_chat.engine import Job
from dflash_chat.messages import (
    Answered,
    Event,
    Failed,
    Loaded,
    PlainMeasured,
    Prefilled,
    RaceDone,
    RaceMoved,
    Round,
    RoundDone,
)
from dflash_chat.pace import Pace
from dflash_chat.picker import near_names
from dflash_chat.race_screen import RaceScreen
from dflash_chat.status import Progress
from dflash_mlx import PairConfig
from dflash_mlx.core.config import AUTO
from dflash_mlx.drafters.methods import needs_drafter
from dflash_mlx.models.names import DEFAULT_MODEL

if TYPE_CHECKING:
    from dflash_chat.chat_app import ChatApp


class Listener:
    """Hears the engine for an app, and draws what it said at a pace of its own.

    job: the answer that is being written. race: the race on screen. waiting: jobs that print their
    progress. dirty: whether something was heard that is not on screen yet.
    """

    def __init__(self, app: ChatApp) -> None:
        self._app = app
        self.job: Job | None = None
        self.race: RaceScreen | None = None
        self.waiting: set[int] = set()
        self.dirty = False
        self._loads: dict[int, PairConfig] = {}
        self._pace = Pace()

    def expect(self, config: PairConfig, job: Job) -> None:
        """A pair is being loaded."""
        self._loads[job.number] = config
        self.waiting.add(job.number)
        self._rest()

    async def stop(self) -> None:
        """Stop the answer; one that has not begun yet is taken back at once."""
        if self.job is None:
            return
        self.job.cancelled.set()
        if not self.job.begun.is_set():
            await self.keep_answer("stopped")

    async def hear(self, event: Event) -> None:
        """Take in one event; those of answers and races that are over say nothing any more."""
        match event:
            case Loaded():
                await self._loaded(event)
            case PlainMeasured():
                self._plain_measured(event)
            case Failed():
                await self._failed(event)
            case RaceMoved() | RaceDone():
                self._raced(event)
            case Prefilled() | RoundDone() | Answered():
                if self.job is not None and self.job.number == event.job:
                    await self._answering(event)

    async def tick(self) -> None:
        """Draw what is new, when it is time."""
        new = self.dirty or self.race is not None
        if new and self._pace.due(time.perf_counter(), time.thread_time()):
            await self._draw()

    async def keep_answer(self, ending: str, leaving: bool = False) -> None:
        """The answer is over: show and save it. Nothing said at all is as if never asked.

        leaving: the program ends; its question stays where it is saved, to be sent another time.
        """
        app = self._app
        self.job = None
        self._rest()
        text = await app.transcript.end(ending)
        await self._draw()
        if not text and ending == "stopped":
            if not leaving:
                await self._take_back()
            return
        figures = app.status.figures.as_dict() if app.status.figures else None
        app.conversation.turns.append(Turn("assistant", text, ending, figures))
        await app.save()
        app.show_header()

    async def _draw(self) -> None:
        self.dirty = False
        self._app.status.draw()
        self._app.draft.draw()
        if self.race is not None:
            self.race.draw()
        await self._app.transcript.draw()

    async def _answering(self, event: Prefilled | RoundDone | Answered) -> None:
        """News of the answer that is being written."""
        if isinstance(event, Answered):
            await self.keep_answer(event.ending)
        elif isinstance(event, RoundDone):
            await self._take_round(event.round)
        elif event.total:
            what = f"reading the prompt, {event.tokens} of {event.total} tokens"
            self._app.status.progress(Progress(what, event.tokens / event.total))

    async def _take_round(self, done: Round) -> None:
        """Keep a round for the next drawing; the first is drawn at once."""
        self._app.status.take(done.figures)
        self._app.draft.take(done.pieces, done.tree)
        self._app.transcript.receive(done.text)
        self.dirty = True
        if done.figures.rounds == 1:
            self._rest()
            await self._draw()

    async def _loaded(self, event: Loaded) -> None:
        """Show the pair, then let it be measured."""
        app = self._app
        app.pair_config = self._loads.pop(event.job, app.pair_config)
        app.info = event.info
        app.status.plain_seconds = None
        self._done_waiting(event.job)
        self.waiting.add(app.engine.measure().number)
        if needs_drafter(app.config.method) and not event.info.means.drafters:
            app.config = replace(app.config, method=AUTO)
        if app.config.method == AUTO and event.info.fallback:
            await app.say(f"{event.info.fallback}. /drafter name adds a drafter.")
        for note in event.info.notes:
            await app.say(f"{note}.")
        app.show_header()

    def _plain_measured(self, event: PlainMeasured) -> None:
        self._app.status.plain_seconds = event.seconds
        self._done_waiting(event.job)
        self._app.status.draw()

    def _done_waiting(self, job: int) -> None:
        self.waiting.discard(job)
        self._rest()

    def _rest(self) -> None:
        """Nothing to show the progress of, but for a pair that waits to be loaded."""
        config = next(iter(self._loads.values()), None)
        what = None if config is None else f"loading {config.model or DEFAULT_MODEL}"
        self._app.status.progress(None if what is None else Progress(what))

    def _raced(self, event: RaceMoved | RaceDone) -> None:
        if self.race is None or self.race.job.number != event.job:
            return
        if isinstance(event, RaceMoved):
            self.race.take(event.step)
        elif event.verdict is not None:
            self.race.draw()
            self.race.finish(event.verdict)

    async def _failed(self, event: Failed) -> None:
        config = self._loads.pop(event.job, None)
        self._done_waiting(event.job)
        if config is not None and config.model is not None:  # a search for near names takes a while
            self._app.run_worker(self._loading_failed(config, event.problem))
        elif config is not None:
            await self._loading_failed(config, event.problem)
        elif self.job is not None and self.job.number == event.job:
            await self._answer_failed(event.problem)
        elif self.race is not None and self.race.job.number == event.job:
            self.race.fail(event.problem)
        else:
            await self._app.say(event.problem, "error")

    async def _loading_failed(self, config: PairConfig, problem: str) -> None:
        app = self._app
        near = await asyncio.to_thread(near_names, config.model) if config.model else []
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        stays = f" {app.info.name} stays loaded." if app.info else ""
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
        else:
            await self._take_back()
        await app.say(problem, "error")

    async def _take_back(self) -> None:
        """Undo the last question and put it into the input line, unless something is typed."""
        app = self._app
        question = app.conversation.turns.pop().content
        await app.transcript.show(app.conversation.turns)
        if not app.prompt.text:
            app.prompt.put(question)
        await app.save()
