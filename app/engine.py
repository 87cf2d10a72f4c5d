"""The worker thread: all MLX work, one request after the other, one message per round."""

from __future__ import annotations

import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Protocol

from dflash_chat.messages import (
    Answered,
    Event,
    Failed,
    Loaded,
    ModelInfo,
    PlainMeasured,
    Prefilled,
    RaceDone,
    RaceMoved,
    RaceStep,
    Round,
    RoundDone,
    Verdict,
)
from dflash_mlx import DecodeConfig, DFlashError, PairConfig

Post = Callable[[Event], object]
OnPrefilled = Callable[[int, int], None]
_FULL = ("unable to allocate", "out of memory", "insufficient memory", "malloc")


@dataclass(frozen=True)
class Question:
    """A conversation to go on with. messages: role and content of each, the question last."""

    messages: tuple[dict[str, str], ...]
    system: str | None
    config: DecodeConfig


class Backend(Protocol):
    """What the worker thread runs; only that thread calls it."""

    def load(self, config: PairConfig) -> ModelInfo:
        """Load a pair in place of the one before, which stays when that fails."""

    def plain_seconds(self) -> float | None:
        """Time of a one-token target pass on this machine; measured once, then remembered."""

    def answer(self, question: Question, prefilled: OnPrefilled) -> Iterator[Round]:
        """The rounds of an answer."""

    def race(self, question: Question) -> Iterator[RaceStep | Verdict]:
        """Steps of decoding plainly and with drafts, then the verdict."""


class Cancelled(GeneratorExit):
    """The user stopped an answer between two prefill passes.

    A GeneratorExit, because that is what a session takes for leaving it between two passes: its
    caches keep what they have.
    """


@dataclass(frozen=True)
class Job:
    """A request in the queue. work: what the thread does for it. begun: whether it does it yet."""

    number: int
    work: Callable[[Job], None]
    begun: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Engine:
    """Runs a backend on a thread of its own and posts what happens.

    post: must be callable from any thread and return at once. The thread is a daemon, so a pass
    that hangs does not keep the program from ending.
    """

    def __init__(self, backend: Backend, post: Post) -> None:
        self._backend, self._post = backend, post
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._numbers = count(1)
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def load(self, config: PairConfig) -> Job:
        """Load a pair: Loaded or Failed."""
        return self._queue(lambda job: self._load(job, config))

    def measure(self) -> Job:
        """Time plain decoding: PlainMeasured or Failed."""
        return self._queue(self._measure)

    def ask(self, question: Question) -> Job:
        """Answer: Prefilled and RoundDone messages, then Answered or Failed."""
        return self._queue(lambda job: self._answer(job, question))

    def race(self, question: Question) -> Job:
        """Race: RaceMoved messages, then RaceDone or Failed."""
        return self._queue(lambda job: self._race(job, question))

    def close(self, seconds: float) -> bool:
        """Stop what runs and end the thread; False when it is still busy after `seconds`."""
        if (running := self._running) is not None:
            running.cancelled.set()
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _queue(self, work: Callable[[Job], None]) -> Job:
        job = Job(next(self._numbers), work)
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._running = job
            job.begun.set()
            try:
                job.work(job)
            except Exception as error:
                self._post(Failed(job.number, describe(error)))
            self._running = None

    def _load(self, job: Job, config: PairConfig) -> None:
        self._post(Loaded(job.number, self._backend.load(config)))

    def _measure(self, job: Job) -> None:
        self._post(PlainMeasured(job.number, self._backend.plain_seconds()))

    def _answer(self, job: Job, question: Question) -> None:
        def prefilled(tokens: int, total: int) -> None:
            self._post(Prefilled(job.number, tokens, total))
            if job.cancelled.is_set():
                raise Cancelled

        ending = "stopped"
        if job.cancelled.is_set():  # while it waited
            self._post(Answered(job.number, ending))
            return
        try:
            with closing(self._backend.answer(question, prefilled)) as rounds:  # type: ignore[type-var]
                for done in rounds:
                    self._post(RoundDone(job.number, done))
                    ending = done.finish_reason or ending
                    if job.cancelled.is_set():
                        break
        except Cancelled:
            pass
        self._post(Answered(job.number, ending))

    def _race(self, job: Job, question: Question) -> None:
        verdict = None
        if job.cancelled.is_set():
            self._post(RaceDone(job.number, verdict))
            return
        with closing(self._backend.race(question)) as steps:  # type: ignore[type-var]
            for step in steps:
                if isinstance(step, Verdict):
                    verdict = step
                else:
                    self._post(RaceMoved(job.number, step))
                if job.cancelled.is_set():
                    break
        self._post(RaceDone(job.number, verdict))


def describe(error: Exception) -> str:
    """A sentence with the next step; a fault of ours also leaves its traceback in a file."""
    if isinstance(error, DFlashError):
        return str(error)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _FULL):
        return (
            f"there is not enough memory ({reason}); close other programs, begin a /new "
            "conversation, or choose a smaller or a quantised /model"
        )
    return (
        f"something went wrong ({reason}); try again, and report it with {_log(error)} if it stays"
    )


def _log(error: Exception) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="dflash-chat-", suffix=".log", delete=False, encoding="utf-8"
        ) as log:
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return "what you did"
    return log.name
