"""Who may ask: hosts, origins of web pages, keys, sizes of bodies, connections."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_mlx.serve.errors import ApiError, body_of, encoded, response_of
from dflash_mlx.serve.settings import LOCAL, is_address

HEALTH = "/health"
_OPEN = HEALTH, "/page/"  # where paths begin that need no key

Check = Callable[[Scope], None]  # raises ApiError


def check_caller(hosts: Collection[str], origins: Collection[str], scope: Scope) -> None:
    """Refuse requests for other hosts, and from web pages that were not named.

    A web page's own name can be pointed at this machine (DNS rebinding); an address cannot. hosts,
    origins: that are allowed besides this machine's own.
    """
    headers = Headers(scope=scope)
    header = headers.get("host", "").strip().lower()
    host = header.rpartition(":")[0] if header.count(":") == 1 else header
    host = header[1:].partition("]")[0] if header.startswith("[") else host
    if host != LOCAL and not is_address(host) and host not in map(str.lower, hosts):
        what = f"the host {host[:200]!r} is not this server"
        raise ApiError(403, f"{what}; start it with --allow-host to change that")
    origin = headers.get("origin", "").lower()
    own = f"{scope['scheme']}://{header}"  # of the page
    if "origin" in headers and origin not in [own, *map(str.lower, origins)]:
        what = f"web pages of {origin[:200]!r} may not use this server"
        raise ApiError(403, f"{what}; start it with --allow-origin to change that")


def check_key(known: Collection[bytes], scope: Scope) -> None:
    """Refuse requests without a key of these digests; the time that it takes says nothing.

    Which one it was becomes `request.state.user`.
    """
    headers = Headers(scope=scope)
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), bearer if kind.lower() == "bearer" else ""]
    found = [key for each in given for key in known if hmac.compare_digest(digest(each), key)]
    scope.setdefault("state", {})["user"] = found[0].hex() if found else ""
    if not found and not scope["path"].startswith(_OPEN):
        what = "the key is missing or wrong; send it as Authorization: Bearer or x-api-key"
        asked = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, what, code="invalid_api_key", headers=asked)


def digest(key: str) -> bytes:
    """All of one length, so that comparing them tells nothing of the key's."""
    return sha256(key.encode("latin-1", "replace")).digest()


def check_size(most: int, scope: Scope) -> None:
    """Refuse bodies that say they are too large; Starlette refuses those that turn out to be."""
    stated = Headers(scope=scope).get("content-length", "")
    if stated.isdecimal() and (len(stated) > 15 or int(stated) > most):
        raise too_large(most)


def too_large(most: int) -> ApiError:
    """The refusal of a body of more than so many bytes."""
    what = f"the request is larger than {most / 10**6:g} MB"
    step = "send less, or start the server with a larger --body-mb"
    return ApiError(413, f"{what}; {step}", headers={"Connection": "close"})


class CheckMiddleware:
    """Lets requests through that no check refuses."""

    def __init__(self, app: ASGIApp, *checks: Check) -> None:
        self._app, self._checks = app, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for check in self._checks:
                check(scope)
        except ApiError as refused:
            await response_of(refused, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class OuterMiddleware:
    """The outermost: counts responses; a fault of ours is a JSON error, and noted."""

    def __init__(
        self,
        app: ASGIApp,
        counted: Callable[[str, int], None],  # is given path and status
        fault: Callable[[Exception], ApiError],  # notes an exception and makes an error of it
    ) -> None:
        self._app, self._counted, self._fault = app, counted, fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def look(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._counted(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, look)
        except Exception as error:
            told = self._fault(error)
            if not began:
                await response_of(told, scope["path"])(scope, receive, look)


class LimitedProtocol(H11Protocol):
    """uvicorn's connections: not too many, none that does nothing for long, refusals in JSON.

    A client has `idle` seconds for the head of a request, from its first byte or the opening of
    the connection on, and to go on reading an answer where it has stopped. (Between two requests
    uvicorn itself waits that long.)
    """

    def __init__(self, *arguments: Any, most: int, idle: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._most = most  # connections of the server
        self._idle = idle
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by what is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            self._refuse(ApiError(503, f"there are {self._most} connections; ask again later"))
        else:
            self._wait("head")

    def data_received(self, data: bytes) -> None:
        """Read on; a head that comes byte by byte does not get more time."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("head")
        elif not self.transport.is_closing():
            self._wait("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("head")
        self._stop("reader")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("reader")

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next request where its bytes are here already
        self._stop("head")

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"this is not an HTTP request ({msg.rstrip('.')})"))

    def _wait(self, what: str) -> None:
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(self._idle, self.transport.abort)

    def _stop(self, what: str) -> None:
        if timer := self._timers.pop(what, None):
            timer.cancel()

    def _refuse(self, error: ApiError) -> None:
        """Say why, and close; without h11, which may be in any state."""
        body = encoded(body_of(error, ""))
        phrase = {400: "Bad Request", 503: "Service Unavailable"}[error.status_code]
        head = f"HTTP/1.1 {error.status_code} {phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(head.encode() + body)
        self.transport.close()
