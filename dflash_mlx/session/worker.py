"""The one thread that touches MLX: it steps a scheduler, and takes orders between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import Observer
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence, Status
from dflash_mlx.engine.state import Earlier
from dflash_mlx.session.scheduler import Scheduler

T = TypeVar("T")


@dataclass(eq=False)
class Request:
    """One answer that is asked for; itself the handle by which it is known."""

    prompt: Prompt | tuple[int, ...]
    config: DecodeConfig
    pair: Pair | None = field(default=None, repr=False)  # that answers; None for the scheduler's
    sequence: Sequence | None = field(default=None, repr=False)
    earlier: Earlier | None = field(default=None, repr=False)  # see `Scheduler.submit`
    user: str = ""  # others share no prefix with, see `Prompt.salted`


@dataclass(frozen=True)
class Begun:
    """A request is taken in; it is read as soon as there is room."""


@dataclass(frozen=True)
class Prefilled:
    """How much of a prompt is in the caches."""

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
    """A piece of work with events, and the observer of what it decodes."""

    def __init__(self, work: Work, post: Callable[[object], object]) -> None:
        self.begun = threading.Event()  # the worker has taken it up
        # Any thread may set it; the job then ends before the next pass over the target, and what
        # it computed stays usable.
        self.cancelled = threading.Event()
        self._work, self._post = work, post
        self._events: Generator[object, None, None] | None = None

    def prefilled(self, tokens: int, total: int) -> None:
        """Post how far the prompt is; leave it there when the job is cancelled."""
        self._post(Prefilled(tokens, total))
        if self.cancelled.is_set():
            raise _Cancelled

    def advance(self) -> bool:
        """Post the work's next event, or that it is over: True."""
        self.begun.set()
        last: Ended | Failed = Ended()
        try:
            self._events = self._events or self._work(self)
            if not self.cancelled.is_set():  # as it may be while it waits
                self._post(next(self._events))
                return False
            self._events.close()
        except (StopIteration, _Cancelled):
            pass
        except Exception as error:
            last = Failed(error)
        self._post(last)
        return True


Work = Callable[[Job], Generator[object, None, None]]
# What became of requests (Begun, deltas, an exception), or of a job, in order.
News = list[tuple["Request | Job", object]]


class _Cancelled(GeneratorExit):
    """A session takes a GeneratorExit for leaving it between two passes: its caches stay."""


class Worker:
    """Runs jobs and requests on a daemon thread: a pass that hangs does not keep the program."""

    def __init__(self, post: Callable[[News], object]) -> None:
        self.used = 0  # bytes of all caches after one of the last steps
        self.steps = 0
        self._post = post  # hears of every step; called on the thread, so it must return at once
        self._orders: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._make: Callable[[], Scheduler] | None = None
        self._scheduler: Scheduler | None = None
        self._open: dict[Sequence, Request] = {}
        self._running: Job | None = None
        self._idle: deque[Job] = deque()
        self._last: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something on the thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._orders.put(run)
        return future

    def run(self, work: Work, idle: bool = False) -> Job:
        """Queue a job that yields its events. idle: it goes on only while nothing else is to do."""
        job = Job(work, lambda event: self._post([(job, event)]))

        def order() -> None:
            self._running = job
            while not job.advance():
                pass
            self._running = None

        self._orders.put((lambda: self._idle.append(job)) if idle else order)
        return job

    def serve(self, make: Callable[[], Scheduler]) -> Future[None]:
        """Answer requests with what `make` returns; called again after a fault of the scheduler."""

        def begin() -> None:
            self._make, self._scheduler = make, make()

        return self.call(begin)

    def ask(self, work: Callable[[Scheduler], T]) -> Future[T]:
        """Run something with what answers requests on the thread, between two steps."""

        def run() -> T:
            assert self._scheduler is not None
            return work(self._scheduler)

        return self.call(run)

    def withdraw(self, job: Job) -> None:
        """End an idle job before anything that is asked for later."""

        def end() -> None:
            job.cancelled.set()
            if job in self._idle:
                self._idle.remove(job)
                job.advance()

        self._orders.put(end)

    def submit(self, request: Request) -> None:
        """Take in a request; Begun or an exception is the first news of it."""
        self._orders.put(lambda: self._submit(request))

    def cancel(self, request: Request) -> None:
        """Give up a request before the next step; nothing more is heard of it."""
        self._orders.put(lambda: self._cancel(request))

    def close(self, seconds: float, last: Callable[[], object] | None = None) -> bool:
        """Cancel the running job, do `last`, end the thread; False if busy after `seconds`."""
        self._last = last
        if (running := self._running) is not None:
            running.cancelled.set()
        self._orders.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._take_orders():
            if self._open:
                self._step()
            elif self._idle and self._idle[0].advance():
                self._idle.popleft()
        for job in self._idle:
            job.cancelled.set()
            job.advance()
        if self._last is not None:
            self._last()

    def _take_orders(self) -> bool:
        """Do what was asked for meanwhile, or wait for it while there is nothing else to do."""
        wait = not self._open and not self._idle
        while True:
            try:
                order = self._orders.get(block=wait)
            except Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _submit(self, request: Request) -> None:
        assert self._scheduler is not None
        try:
            prompt = Prompt.of(request.prompt).salted(request.user)
            given = request.config, request.pair, request.earlier
            sequence = self._scheduler.submit(prompt, *given)
        except Exception as error:  # of any kind: the others go on
            self._post([(request, error)])
            return
        request.sequence = sequence
        self._open[sequence] = request
        self._post([(request, Begun())])

    def _cancel(self, request: Request) -> None:
        sequence = request.sequence
        if sequence is not None and self._scheduler is not None:
            self._open.pop(sequence, None)
            self._scheduler.cancel(sequence)
            request.sequence = request.pair = None
            self._look()

    def _step(self) -> None:
        assert self._scheduler is not None and self._make is not None
        try:
            news: News = [(self._open[each], said) for each, said in self._scheduler.step()]
            going_on = [each for each in self._open if each.status is not Status.FINISHED]
            self._open = {each: self._open[each] for each in going_on}
        except Exception as error:  # a fault of ours, after which no cache can be trusted
            news = [(request, error) for request in self._open.values()]
            self._open = {}
            self._scheduler = self._make()
        self._look()
        if news:
            self._post(news)
        self._scheduler.keep_finished()

    def _look(self) -> None:
        self.steps += 1
        if self._scheduler is not None and (self.steps % 16 == 0 or not self._open):
            self.used = self._scheduler.used
