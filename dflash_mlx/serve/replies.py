"""The answers of one request as parts, however they are written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.delta import Delta, TokenLogprobs
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.errors import ApiError, as_json
from dflash_mlx.serve.prompts import Chat, Prompt
from dflash_mlx.serve.reading import AnswerReader, Part, Reader, TextReader
from dflash_mlx.serve.request_queue import ResponseStream

T = TypeVar("T")

TOOLS = "tool_calls"  # the reason of an answer that ends with calls
PING = 10.0  # seconds without a word after which a stream says that it is alive


class ClientGone(Exception):
    """Nobody reads the answer any more."""


@dataclass(frozen=True)
class End:
    """An answer is over.

    reason: "stop", "length", "context" or `TOOLS`. stop_text: the stop text that ended it.
    """

    reason: str
    stop_text: str | None
    statistics: Statistics
    parked: str


@dataclass(frozen=True)
class Step:
    """What a step added to one of the answers; several may come at once.

    index: which answer. logprobs: of its tokens. end: of the last step of an answer.
    """

    index: int
    parts: Sequence[Part] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: End | None = None


class Writer(Protocol):
    """Writes the answers of one request down in the words of an API."""

    ping: bytes  # the event that says that a stream is alive

    def start(self) -> list[bytes]:
        """The events before the first step."""

    def step(self, step: Step) -> list[bytes]:
        """Keep a step; its events."""

    def end(self) -> list[bytes]:
        """The events after the last step."""

    def error(self, error: ApiError) -> bytes:
        """The last event where the answers break off."""

    def whole(self) -> dict[str, Any]:
        """The response as one object, after the last step."""


def unspaced(token: int) -> bool:
    """An answer that begins by itself needs no space before it."""
    return False


def reader_of(pair: Pair, chat: Chat, prompt: Prompt, one_call: bool) -> Reader:
    """What reads an answer to `chat`; JSON is taken as it is, whatever its strings look like."""
    if chat.structure.kind and not chat.tools:
        return TextReader()
    return AnswerReader(pair.tokenizer, chat.tools, prompt.in_thought, one_call)


@dataclass
class Replies:
    """The answers of a request.

    readers: one for each. spaced: whether a token begins with a space, where answers go on with a
    text; mlx-lm leaves that out of the beginning of a text.
    """

    ticket: ResponseStream
    readers: Sequence[Reader]
    spaced: Callable[[int], bool] = unspaced
    _leads: dict[int, str] = field(default_factory=dict)
    # By answer: says why its latest round without drafts had none.
    _parked: dict[int, Callable[[], str] | None] = field(default_factory=dict)

    async def steps(self) -> AsyncIterator[Step | None]:
        """Until all answers are over; None where nothing came for `PING` seconds.

        Raises ApiError where an answer breaks off. Who stops listening calls `close`.
        """
        while not self.ticket.is_over:
            found = await self.ticket.next(PING)
            if found is None:
                yield None
                continue
            index, delta = found
            reader = self.readers[index]
            if reader.is_over:
                continue
            if delta.proposal.mode == "plain":
                self._parked[index] = delta.proposal.why
            parts = reader.feed(self._lead(index, delta) + delta.text)
            if delta.finish_reason is not None:
                parts += reader.finish()
            elif reader.is_over:
                self.ticket.drop(index)
            over = delta.finish_reason is not None or reader.is_over
            yield Step(index, parts, delta.logprobs, self._end(index, delta) if over else None)

    def _lead(self, index: int, delta: Delta) -> str:
        """The space that the first text of an answer lacks."""
        if index not in self._leads and delta.tokens:
            self._leads[index] = " " if self.spaced(delta.tokens[0]) else ""
        if not delta.text or not self._leads.get(index):
            return ""
        lead, self._leads[index] = self._leads[index], ""
        return "" if delta.text.startswith(lead) else lead

    def _end(self, index: int, delta: Delta) -> End:
        reason = delta.finish_reason or "stop"
        if self.readers[index].called and reason == "stop":
            reason = TOOLS
        why = self._parked.get(index)
        return End(reason, delta.stop_text, delta.statistics, why() if why is not None else "")

    def close(self) -> None:
        """Give up what is not over."""
        self.ticket.close()


def merged(ends: Sequence[End]) -> dict[str, Any]:
    """The field `dflash` of a response: what decoding its answers took, all of them together."""
    each = [end.statistics for end in ends]
    rounds, drafted = sum(s.rounds for s in each), sum(s.drafted.total() for s in each)
    further = sum(max(0, s.generated_tokens - 1) for s in each)
    accepted = sum(s.accepted.total() for s in each)
    longest = max(s.decode_seconds for s in each)
    return {
        "method": each[0].method,
        "rounds": rounds,
        "acceptance_length": further / rounds if rounds else 0.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "tokens_per_second": further / longest if longest else 0.0,
        "time_to_first_token": min(s.time_to_first_token for s in each),
        "parked": next((end.parked for end in ends if end.parked), None),
    }


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns; ClientGone, and the work ended, where the client leaves before."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def write(
    request: Request, replies: Replies, writer: Writer, streamed: bool | None
) -> Response:
    """The response to a request: events as the answers grow, or one object in the end."""
    if streamed:
        return EventStream(_events(replies, writer), replies.close)
    try:
        await unless_gone(request, _read(replies, writer))
    finally:
        replies.close()
    return as_json(writer.whole())


async def _events(replies: Replies, writer: Writer) -> AsyncIterator[bytes]:
    """The events of a stream; an error is the last one."""
    for event in writer.start():
        yield event
    try:
        async for step in replies.steps():
            for event in writer.step(step) if step is not None else (writer.ping,):
                yield event
    except ApiError as error:
        yield writer.error(error)
        return
    for event in writer.end():
        yield event


async def _read(replies: Replies, writer: Writer) -> None:
    """Have the writer take all that the answers say."""
    async for step in replies.steps():
        if step is not None:
            writer.step(step)


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, as long as somebody reads them.

    events: each with its empty line. close: called in the end, whatever happened.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them; what is left is given up where the client leaves."""
        try:
            await unless_gone(Request(scope, receive), self._send(send))
        except ClientGone:
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
