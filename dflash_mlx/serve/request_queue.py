"""Between the clients and the thread that decodes: who is let in, and who hears of which answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.drafters.methods import source_of
from dflash_mlx.engine.delta import Delta, TokenLogprobs, token_bytes
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.errors import ApiError, of_settings
from dflash_mlx.serve.metrics import Metrics
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.session.calls import THOUGHT, WORDS, Part
from dflash_mlx.session.reading import AnswerReader
from dflash_mlx.session.worker import Begun, News, Request, Worker

TOOLS = "tool_calls"  # the reason of an answer that ends with calls
PING = 10.0  # seconds without a word after which a stream says that it is alive
_FIRST_GUESS, _LONGEST = 5.0, 60.0  # seconds until another answer is over
_LOOK = 0.05  # seconds until it is looked again whether all answers are over
_ENDED = "the server is shutting down, and this answer was not finished in time"


@dataclass(eq=False)
class Reply(Request):
    """One answer: what the worker is asked for, and what has come of it."""

    index: int = 0  # among the answers of its HTTP request
    behind: Reply | None = None  # another with the same prompt, which counts once
    reader: AnswerReader = field(default_factory=AnswerReader)
    hides_thoughts: bool = False  # they are made and counted, but not told
    ignored: Sequence[str] = ()  # fields of its request that changed nothing
    goes_on: bool = False  # with a text; a space is cut off at the beginning of others
    parts: list[Part] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # that no event has told yet
    until: list[int] = field(default_factory=list)  # how many had come by the end of each part
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # where they are asked for
    echo: str | None = None  # the prompt's text, where the answer is told behind it
    rounds: list[Delta] | None = None  # untold; None where nobody asks what was drafted
    reason: str = ""  # why it ended, as OpenAI says it: "stop", "length" or TOOLS; "" before
    stop_text: str | None = None  # that ended it
    sources: Counter[str] = field(default_factory=Counter)  # of accepted drafted tokens
    said: float = 0.0  # Unix seconds of the latest earlier text that some are from; 0 for none
    statistics: Statistics = field(default_factory=lambda: Statistics(""))
    parked: Callable[[], str] | None = None  # says why its latest round without drafts had none
    since: float = field(default_factory=time.monotonic)
    _lead: str | None = None  # space before the first text

    def __post_init__(self) -> None:
        """Know the tokenizer of the model that answers, also when the answer is over."""
        self.tokenizer: Any = self.pair and self.pair.tokenizer

    def take(self, delta: Delta) -> list[Part]:
        """What a delta adds."""
        if delta.proposal.mode == "plain":
            self.parked = delta.proposal.why
        if self.rounds is not None:
            self.rounds.append(delta)
        tree = delta.accepted.tree
        for node in delta.accepted.path[1:]:
            self.sources[source_of(tree, node, delta.statistics.method)] += 1
            self.said = max(self.said, tree.said[node] if tree.said else 0.0)
        parts = self.reader.feed(self._text(delta), delta.tokens)
        is_cut = delta.finish_reason in ("length", "context")
        if delta.finish_reason is not None:
            parts += self.reader.finish(is_cut)
        if delta.finish_reason is not None or self.reader.is_over:
            self.reason = "length" if is_cut else TOOLS if self.reader.called else "stop"
        if self.hides_thoughts:
            parts = [part for part in parts if part.kind != THOUGHT]
        if self.echo is not None and not self.parts:  # the first
            parts.insert(0, Part(WORDS, self.echo))
            self.prompt_logprobs = delta.prompt_logprobs
            self.logprobs += (self.behind or self).prompt_logprobs
        self.parts += parts
        self.logprobs += delta.logprobs
        self.until += [len(self.logprobs)] * len(parts)
        self.stop_text, self.statistics = delta.stop_text, delta.statistics
        return parts

    def _text(self, delta: Delta) -> str:
        if self._lead is None and delta.tokens:
            spaced = self.goes_on and token_bytes(self.tokenizer, delta.tokens[0])[:1] == b" "
            self._lead = " " if spaced else ""
        if not delta.text:
            return ""
        lead, self._lead = self._lead or "", ""
        return delta.text if delta.text.startswith(" ") else lead + delta.text


class ResponseStream:
    """The answers of one HTTP request, as they come."""

    def __init__(self, queue: RequestQueue, replies: Sequence[Reply]) -> None:
        self.replies = tuple(replies)
        self._queue = queue
        self._news: deque[tuple[Reply, Delta | Exception]] = deque()
        self._came = asyncio.Event()
        self._waiting = len(self.replies)  # answers that are not taken in yet
        self.pause = PING  # silent seconds after which it says that it is alive

    async def begun(self) -> None:
        """Return when all answers are taken in; ApiError where one is not."""
        while self._waiting:
            await self._came.wait()
            self._came.clear()
            for _, said in self._news if self._waiting else ():
                if isinstance(said, Exception):
                    raise self._queue.as_api_error(said)

    async def steps(self) -> AsyncIterator[tuple[Reply, list[Part]] | None]:
        """An answer and what was added to it, until all are over; None after a silent `pause`.

        Raises ApiError where an answer breaks off.
        """
        while not all(reply.reason for reply in self.replies):
            if not self._news:
                await self._wait()
            if not self._news:
                yield None
                continue
            reply, said = self._news.popleft()
            if isinstance(said, Exception):
                raise self._queue.as_api_error(said)
            if reply.reason:
                continue
            parts = reply.take(said)
            if reply.reason and said.finish_reason is None:  # its reader has what it wants
                self._queue.drop(reply)
            yield reply, parts

    async def _wait(self) -> None:
        """For news; not by `wait_for`, which before Python 3.12 can lose a cancellation."""
        self._came.clear()
        timer = asyncio.get_running_loop().call_later(self.pause, self._came.set)
        try:
            await self._came.wait()
        finally:
            timer.cancel()

    def hear(self, reply: Reply, said: object) -> None:
        if isinstance(said, Begun):
            self._waiting -= 1
            assert reply.sequence is not None
            reply.statistics = reply.sequence.statistics
        elif isinstance(said, (Delta, Exception)):
            self._news.append((reply, said))
        self._came.set()

    def close(self) -> None:
        """Give up all that are not over; nothing happens to those that are."""
        for each in self.replies:
            self._queue.drop(each)


class RequestQueue:
    """Hands requests to the worker and its news to their streams; for one event loop."""

    def __init__(self, config: ServeConfig, fault: Callable[[Exception], ApiError]) -> None:
        self.metrics = Metrics()
        self.fault = fault  # notes an exception and makes an error of it
        self.worker = Worker(self._post)
        self._parallel = config.parallel  # answers that are decoded together
        self._most = config.parallel + config.queue
        self._streams: dict[Reply, ResponseStream] = {}  # of answers that are not over
        self._usual = _FIRST_GUESS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._preparing = 0  # requests whose prompts are made
        self.metrics.decoding.set_function(lambda: len(self) - self.waiting)
        self.metrics.waiting.set_function(lambda: self.waiting)

    def __len__(self) -> int:
        """Answers that are not over, those that wait included."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Answers that wait for a place among those that are decoded."""
        return max(0, len(self) - self._parallel)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A place for a request whose prompt is made; ApiError where there is none."""
        self._check_room(1 + self._preparing)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def answers(self, pair: Pair) -> bool:
        """Whether a pair has answers that are not over."""
        return any(reply.pair is pair for reply in self._streams)

    def _check_room(self, further: int) -> None:
        """ApiError where so many answers more cannot be let in."""
        if self._closing:
            raise ApiError(503, "the server is shutting down; ask again when it is back")
        if (ahead := len(self) + further - self._most) > 0:
            seconds = math.ceil(min(max(1.0, self._usual * ahead / self._parallel), _LONGEST))
            what = f"{len(self)} answers are being decoded or wait; ask again after {seconds} s"
            raise ApiError(429, what, headers={"Retry-After": str(seconds)})

    async def open(self, replies: Sequence[Reply]) -> ResponseStream:
        """Ask for answers, and return when all are taken in; ApiError where that cannot be."""
        self._loop = asyncio.get_running_loop()
        if len(replies) > self._most:
            what = f"{len(replies)} answers are asked for, and there are {self._most} places"
            raise ApiError(400, f"{what}; ask for fewer")
        self._check_room(len(replies))
        stream = ResponseStream(self, replies)
        for each in replies:
            self._streams[each] = stream
            self.worker.submit(each)
        try:
            await stream.begun()
        except BaseException:  # whatever ends the request, nobody reads these answers
            stream.close()
            raise
        return stream

    def drop(self, reply: Reply) -> None:
        """Give up an answer, unless it is over."""
        if self._streams.pop(reply, None) is not None:
            self.worker.cancel(reply)
            self.metrics.ended("gone")

    async def drain(self, grace: float) -> None:
        """Let nobody in, and return when all answers are over; after `grace` seconds end them."""
        self._closing = True
        ends = time.monotonic() + grace
        while self._streams and time.monotonic() < ends:
            await asyncio.sleep(_LOOK)
        for reply, stream in [*self._streams.items()]:
            self.drop(reply)
            stream.hear(reply, ApiError(503, _ENDED))

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
        for reply, said in news:
            if not isinstance(reply, Reply) or (stream := self._streams.get(reply)) is None:
                continue
            if isinstance(said, Exception):
                self.metrics.ended("failed")
                self._forget(reply)
            elif isinstance(said, Delta):
                self.metrics.told(said)
                if said.finish_reason is not None:
                    self._usual += 0.2 * (time.monotonic() - reply.since - self._usual)
                    self._forget(reply)
            stream.hear(reply, said)

    def _forget(self, reply: Reply) -> None:
        """Let an answer that is over hold no caches and no model, however slowly it is read."""
        del self._streams[reply]
        reply.sequence = reply.pair = None
