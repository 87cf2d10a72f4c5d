"""Between the clients and the thread that decodes: who is let in, and who hears of which answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.delta import Delta
from dflash_mlx.serve.errors import ApiError, of_settings
from dflash_mlx.serve.metrics import Metrics
from dflash_mlx.session.worker import Begun, News, Request, Worker

_FIRST_GUESS, _LONGEST = 5.0, 60.0  # seconds until another answer is over
_ENDED = "the server is shutting down, and this answer was not finished in time"


class ResponseStream:
    """The answers of one request, as they come."""

    def __init__(self, queue: RequestQueue, asked: Sequence[Request]) -> None:
        self.asked = tuple(asked)
        self._desk = queue
        self._news: asyncio.Queue[tuple[Request, object] | None] = asyncio.Queue()
        self._begun: list[tuple[Request, object]] = []
        self._left = len(self.asked)

    async def begun(self) -> None:
        """Return when all answers are taken in; ApiError where one is not."""
        for _ in self.asked:
            while True:
                news = await self._news.get()
                if news is None or isinstance(news[1], Begun):
                    break
                if isinstance(news[1], Exception):
                    raise self._desk.as_api_error(news[1])
                self._begun.append(news)

    async def next(self, seconds: float) -> tuple[int, Delta] | None:
        """The next piece and which answer it is of; None where there was none for so long.

        ApiError where an answer broke off.
        """
        found = self._begun.pop(0) if self._begun else await self._wait(seconds)
        if found is None:
            return None
        asked, said = found
        if isinstance(said, Exception):
            raise self._desk.as_api_error(said)
        assert isinstance(said, Delta)
        self._left -= said.finish_reason is not None
        return self.asked.index(asked), said

    async def _wait(self, seconds: float) -> tuple[Request, object] | None:
        """The next news; not by `wait_for`, which before Python 3.12 can lose a cancellation."""
        timer = asyncio.get_running_loop().call_later(seconds, self._news.put_nowait, None)
        try:
            return await self._news.get()
        finally:
            timer.cancel()

    @property
    def is_over(self) -> bool:
        """Whether all answers have their last piece, or were given up."""
        return self._left <= 0

    def hear(self, news: tuple[Request, object]) -> None:
        """Take in what the thread said."""
        self._news.put_nowait(news)

    def drop(self, index: int) -> None:
        """Give up one of the answers, which has no last piece yet."""
        self._left -= 1
        self._desk.drop(self.asked[index])

    def close(self) -> None:
        """Give up all that are not over; nothing happens to those that are."""
        for each in self.asked:
            self._desk.drop(each)


class RequestQueue:
    """Hands requests to the worker and its news to their tickets; for one event loop.

    parallel: answers that are decoded together. queue: answers that may wait besides. fault: notes
    an exception and makes an error of it.
    """

    def __init__(
        self,
        metrics: Metrics,
        parallel: int,
        queue: int,
        fault: Callable[[Exception], ApiError],
    ) -> None:
        self.metrics, self.fault = metrics, fault
        self.worker = Worker(self._post)
        self._parallel, self._most = parallel, parallel + queue
        self._tickets: dict[Request, ResponseStream] = {}
        self._since: dict[Request, float] = {}
        self._usual = _FIRST_GUESS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """Answers that are not over, those that wait included."""
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Answers that wait for a place among those that are decoded."""
        return max(0, len(self) - self._parallel)

    def open(self, asked: Sequence[Request]) -> ResponseStream:
        """Ask for answers; ApiError where there is no room for them, or not any more."""
        self._loop = asyncio.get_running_loop()
        if self._closing:
            raise ApiError(503, "the server is shutting down; ask again when it is back")
        if len(self) + len(asked) > self._most:
            after = {"Retry-After": str(self._wait(len(asked)))}
            what = f"{len(self)} answers are being decoded or wait"
            raise ApiError(429, f"{what}; ask again after {after['Retry-After']} s", headers=after)
        ticket = ResponseStream(self, asked)
        for each in asked:
            self._tickets[each], self._since[each] = ticket, time.monotonic()
            self.worker.submit(each)
        self._count()
        return ticket

    def drop(self, asked: Request) -> None:
        """Give up an answer, unless it is over."""
        if self._tickets.pop(asked, None) is not None:
            self._since.pop(asked)
            self.worker.cancel(asked)
            self.metrics.ended("gone")
            self._count()

    async def drain(self, grace: float) -> None:
        """Let nobody in, and return when all answers are over; after `grace` seconds end them."""
        self._closing = True
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
        except asyncio.TimeoutError:
            for asked, ticket in list(self._tickets.items()):
                self.drop(asked)
                ticket.hear((asked, ApiError(503, _ENDED)))

    def as_api_error(self, error: Exception) -> ApiError:
        """What went wrong, for the client."""
        if isinstance(error, ApiError):
            return error
        return of_settings(error) if isinstance(error, DFlashError) else self.fault(error)

    def _post(self, news: News) -> None:
        """On the worker's thread."""
        if self._loop is None:
            return
        with suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(self._hear, news)

    def _hear(self, news: News) -> None:
        for asked, said in news:
            ticket = self._tickets.get(asked)  # type: ignore[arg-type]
            if ticket is None or not isinstance(asked, Request):
                continue
            if isinstance(said, Delta):
                self.metrics.told(said)
            if isinstance(said, Exception) or (isinstance(said, Delta) and said.finish_reason):
                self._finish(asked, said)
            ticket.hear((asked, said))

    def _finish(self, asked: Request, said: Delta | Exception) -> None:
        del self._tickets[asked]
        took = time.monotonic() - self._since.pop(asked)
        if isinstance(said, Delta):
            self._usual += 0.2 * (took - self._usual)
            self.metrics.finished(said)
        else:
            self.metrics.ended("failed")
        self._count()

    def _count(self) -> None:
        self.metrics.busy(len(self) - self.waiting, self.waiting)
        if self._tickets:
            self._empty.clear()
        else:
            self._empty.set()

    def _wait(self, more: int) -> int:
        """Seconds until there may be room for so many more answers."""
        ahead = len(self) + more - self._most
        return math.ceil(min(max(1.0, self._usual * ahead / self._parallel), _LONGEST))
