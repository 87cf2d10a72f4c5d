"""The worker thread: all MLX work, one job after the other; its client hears what happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue

from dflash_mlx.core.observer import Observer


@dataclass(frozen=True)
class Prefilled:
    """So many of a prompt's tokens are in the caches."""

    tokens: int
    total: int


@dataclass(frozen=True)
class Ended:
    """A job is over, whether or not it was cancelled; its last event."""


@dataclass(frozen=True)
class Failed:
    """A job broke off; its last event."""

    error: Exception


class Job(Observer):
    """One request to the worker, and the observer of its decoding.

    begun: the worker has taken it up. cancelled: any thread may set it; the job then ends before
    the next pass over the target, and what it computed stays usable.
    """

    def __init__(self, work: Work, post: Post) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self._work, self._post = work, post

    def prefilled(self, tokens: int, total: int) -> None:
        """Post how far the prompt is; leave it there when the job is cancelled."""
        self._post(self, Prefilled(tokens, total))
        if self.cancelled.is_set():
            raise _Cancelled

    def run(self) -> None:
        """Post each event of the work, then Ended or Failed."""
        self.begun.set()
        last: Ended | Failed = Ended()
        try:
            with closing(self._work(self)) as events:
                while not self.cancelled.is_set():  # as it may be while it waits
                    self._post(self, next(events))
        except (StopIteration, _Cancelled):
            pass
        except Exception as error:
            last = Failed(error)
        self._post(self, last)


Work = Callable[[Job], Generator[object, None, None]]
Post = Callable[[Job, object], object]


class _Cancelled(GeneratorExit):
    """A job was cancelled between two prefill passes.

    A GeneratorExit, because that is what a session takes for leaving it between two passes: its
    caches keep what they have.
    """


class Worker:
    """Runs jobs on a thread of its own.

    post: hears every event of every job; called on the worker's thread, so it must return at once.
    The thread is a daemon: a pass that hangs does not keep the program from ending.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._running: Job | None = None
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Job:
        """Queue a job. work: yields its events; closed where the job is cancelled."""
        job = Job(work, self._post)
        self._jobs.put(job)
        return job

    def close(self, seconds: float, last: Callable[[], None] | None = None) -> bool:
        """Cancel what runs and end the thread; False when it is still busy after `seconds`.

        last: what it does before it ends.
        """
        self._last = last
        if (running := self._running) is not None:
            running.cancelled.set()
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._running = job
            job.run()
            self._running = None
        if self._last is not None:
            self._last()
