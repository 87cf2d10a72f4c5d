"""The way of a request: checked, made a prompt, asked for, and written down as it is answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_mlx.cli.options import say
from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.drafters.continuations.store import Stores
from dflash_mlx.engine.delta import opens_thought
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.chat import Chat, prompt_of
from dflash_mlx.serve.errors import ApiError, as_json, refusal
from dflash_mlx.serve.fields import Answered, Asked, ChatBody, Conversation, decoding
from dflash_mlx.serve.kept import Shelf
from dflash_mlx.serve.lenient import told
from dflash_mlx.serve.pictures import fetched, seen
from dflash_mlx.serve.request_queue import Reply, RequestQueue, ResponseStream
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.serve.structure import structure_of
from dflash_mlx.session.calls import Part
from dflash_mlx.session.forms import form_of
from dflash_mlx.session.models import Models
from dflash_mlx.session.reading import AnswerReader, SchemaReader

T = TypeVar("T")

Understood = tuple[Chat, StructureConfig | None, Prompt]

_PROGRESS = 1.0  # seconds between two events that say how much of a prompt is read
_GONE = 499  # nobody reads it


@dataclass
class Service:
    """What is served, and how."""

    models: Models
    usual: DecodeConfig  # how answers are decoded where a request does not say
    config: ServeConfig
    queue: RequestQueue
    earlier: Stores  # of each user, what drafts may come from
    shelf: Shelf = field(default_factory=Shelf, repr=False)
    started: int = field(default_factory=lambda: int(time.time()))
    # Prompts are rendered, and grammars compiled, while answers stream on.
    _prompts: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "prompts"), repr=False
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models, those of the first one first."""
        return (*self.models.by_name,)

    def check(self, body: Asked) -> None:
        """ApiError for what is not served; any other name becomes the first model's, if it may.

        So programs work whose names of models are built in.
        """
        if body.model not in self.names:
            body.model = body.model.removesuffix(":latest")  # which Ollama's clients add
        if body.model not in self.names and not self.config.strict:
            body.model = self.names[0]
        self.check_model(body.model)
        if self.config.strict:
            for field in body.idle():
                raise refusal(field, "changes nothing here", "leave it out")

    def check_model(self, name: str) -> None:
        """ApiError for a model that is not served."""
        if name not in self.names:
            what = f"the model {name[:200]!r} is not served here; ask for {self.names[0]!r}"
            raise ApiError(404, what, "model", "model_not_found")

    async def prepare(self, work: Callable[[], T]) -> T:
        """Do what may take long, as rendering a long prompt, while answers stream on.

        ApiError where no answer would be let in, before anything is done.
        """
        with self.queue.preparing():
            return await asyncio.get_running_loop().run_in_executor(self._prompts, work)

    @asynccontextmanager
    async def using(self, body: Asked) -> AsyncIterator[Pair]:
        """The model that a request asks for, loaded; ApiError for what is not served."""
        self.check(body)
        try:
            with self.queue.preparing():  # is there a place? It is not kept: a load may hang
                pass
            pair = await self.models.take(body.model)
        except DFlashError as error:  # which may name folders, that clients do not learn
            say(f"{body.model} cannot be loaded: {error}")
            what = f"the model {body.model!r} cannot be loaded now; the server's terminal says why"
            raise ApiError(503, what) from None
        except Exception as error:
            raise self.queue.as_api_error(error) from None
        try:
            yield pair
        finally:
            self.models.leave(body.model)

    async def read(self, pair: Pair, body: Conversation, request: Request) -> Understood:
        """A conversation, what an answer to it has to be, and its prompt."""
        most, files = self.config.messages, dict[str, bytes]()
        if self.config.allow_image_urls and pair.target.sees:
            read = partial(fetched, body, int(self.config.body_mb * 10**6))
            files = await asyncio.to_thread(read)

        def opened() -> Chat:
            chat = replace(
                body.chat(),
                arguments=body.chat_template_kwargs or {},
                wishes=body.wishes,
                user=user_of(request),
                ignored=None if self.config.strict else request.state.ignored,
            )
            if (number := len(chat.messages)) > most:
                what = f"come to {number}, and {most} may be"
                raise refusal(chat.fields.messages, what, "send fewer")
            return seen(pair, chat, body, files)

        def understood(chat: Chat) -> Understood:
            prompt = prompt_of(pair, chat)
            chat = replace(chat, opened=opens_thought(pair.tokenizer, prompt.tokens))
            return chat, structure_of(pair, chat), prompt

        work = partial(understood, await self.prepare(opened))
        if work.args[0].pictures:  # whose processor computes, which one thread may
            return await asyncio.wrap_future(self.queue.worker.call(work))
        return await self.prepare(work)

    def close(self) -> None:
        self.models.close()
        self._prompts.shutdown(wait=False, cancel_futures=True)

    def replies(
        self,
        request: Request,
        body: Answered,
        pair: Pair,
        configs: Sequence[DecodeConfig],
        prompts: Sequence[Prompt | tuple[int, ...]],
    ) -> list[Reply]:
        """An answer of each of these settings to each prompt, for `RequestQueue.open`."""
        user = user_of(request)
        own = self.earlier.of(pair.target.name, pair.tokenizer, user)
        own = own if body.lookup_in is None else None
        replies: list[Reply] = []
        for prompt in prompts:
            first = None  # whose prompt the others share
            for config in configs:
                its = config if first is None else replace(config, prompt_logprobs=None)
                reply = Reply(prompt, its, pair, earlier=own, user=user, behind=first)
                reply.index = len(replies)
                replies.append(reply)
                first = first or reply
        return replies


def user_of(request: Request) -> str:
    """Who asks: a digest of the key; without keys all are one user, who is not that of the chat."""
    return str(getattr(request.state, "user", "") or "anyone")


class Writer(Protocol):
    """Writes the answers of one request down in the words of an API, a few events at a time."""

    @property
    def ping(self) -> bytes:
        """Says that a stream is alive."""

    def start(self) -> bytes:
        """Before the first part."""
        return b""

    def part(self, reply: Reply, part: Part) -> bytes:
        """Another part of an answer."""

    def end(self, reply: Reply) -> bytes:
        """An answer is over; with the last of them the stream is, too."""

    def error(self, error: ApiError) -> bytes:
        """The answers break off."""

    def whole(self) -> dict[str, Any]:
        """The response as one object, when all is over."""


WriterOf = Callable[[Any, Sequence[Reply]], Writer]  # the first is the body of the request


async def converse(request: Request, body: ChatBody, writer: WriterOf) -> Response:
    """The response to a conversation of any API."""
    service: Service = request.app.state.service

    async def begin() -> ResponseStream:
        body.check()
        async with service.using(body) as pair:
            chat, structure, prompt = await service.read(pair, body, request)
            configs = decoding(service.usual, body, structure, request.state.ignored)
            reader: Callable[[], AnswerReader] = AnswerReader
            if structure is None or structure.grammar is not None:  # else JSON, taken as it is
                streams = bool(body.stream and body.streams_calls)
                how = chat.told, chat.opened, chat.one_call, streams
                kind = AnswerReader if chat.schema is None else SchemaReader
                reader = partial(kind, pair.tokenizer, form_of(pair), *how)
            replies = service.replies(request, body, pair, configs, [prompt])
            for reply in replies:
                reply.reader, reply.goes_on = reader(), chat.go_on
                reply.hides_thoughts = body.include_reasoning is False
            return await service.queue.open(replies)

    return await answer(request, body, begin(), writer)


async def count(request: Request, body: Conversation) -> dict[str, Any]:
    """How many tokens the prompt of a conversation has, in the words of all APIs."""
    service: Service = request.app.state.service

    async def made() -> dict[str, Any]:
        async with service.using(body) as pair:
            prompt = (await service.read(pair, body, request))[-1]
        return {"input_tokens": len(prompt), "dflash": {"ignored": _ignored(request, body)}}

    return await unless_gone(request, made())


def _ignored(request: Request, body: Asked) -> list[str]:
    """Names of the request's fields that changed nothing."""
    service: Service = request.app.state.service
    idle = [] if service.config.strict else body.idle()
    return told([*idle, *request.state.ignored])


async def answer(
    request: Request, body: Answered, begin: Awaitable[ResponseStream], make: WriterOf
) -> Response:
    """The response to a request: events as the answers grow, or one object in the end."""
    stream = await unless_gone(request, begin)
    stream.replies[0].ignored = _ignored(request, body)
    writer = make(body, stream.replies)
    stream.pause = _PROGRESS if body.return_progress else stream.pause
    if body.stream:
        return EventStream(stream, writer, body.media)
    try:
        await unless_gone(request, _read(stream))
    finally:
        stream.close()
    return as_json(writer.whole())


async def _read(stream: ResponseStream) -> None:
    """Have the answers keep what comes, until all are over."""
    async for _ in stream.steps():
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns; where the client leaves before, the work is ended with an ApiError."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(_GONE, "the client has disconnected")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """What a writer tells, as long as somebody reads it."""

    def __init__(self, stream: ResponseStream, writer: Writer, media: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(stream, writer), headers=headers, media_type=media)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


async def _events(stream: ResponseStream, writer: Writer) -> AsyncIterator[bytes]:
    """The events of a stream; an error is the last one."""
    yield writer.start()
    try:
        async for step in stream.steps():
            if step is None:
                yield writer.ping
                continue
            reply, parts = step
            events = [writer.part(reply, part) for part in parts]
            yield b"".join((*events, writer.end(reply) if reply.reason else b""))
    except ApiError as error:
        yield writer.error(error)


def progress(body: Answered, reply: Reply) -> dict[str, Any]:
    """The field `dflash` while a prompt is read, where a request asks for that; else nothing."""
    sequence, total = reply.sequence, len(reply.prompt)
    read = total if sequence is None else sequence.state.position
    if not body.return_progress or read >= total:
        return {}
    cached = reply.statistics.reused_tokens
    return {"dflash": {"prompt_progress": {"total": total, "cache": cached, "processed": read}}}


def figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """The field `dflash` of a response: what decoding its answers took, all of them together."""
    each = [reply.statistics for reply in replies]
    rounds, drafted = sum(s.rounds for s in each), sum(s.drafted.total() for s in each)
    further = sum(max(0, s.generated_tokens - 1) for s in each)
    accepted = sum(s.accepted.total() for s in each)
    longest = max(s.decode_seconds for s in each)
    said = max(reply.said for reply in replies)  # by which other conversations helped, if any
    parked = (reply.parked() for reply in replies if reply.parked is not None)
    return {
        "method": each[0].method,
        "rounds": rounds,
        "acceptance_length": further / rounds if rounds else 0.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "accepted_from": dict(sum((reply.sources for reply in replies), Counter())),
        "said_before_seconds": max(0.0, time.time() - said) if said else None,
        "tokens_per_second": further / longest if longest else 0.0,
        "time_to_first_token": min(s.time_to_first_token for s in each),
        "parked": next((why for why in parked if why), None),
        "ignored": [*replies[0].ignored],
    }
