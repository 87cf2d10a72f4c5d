"""Who may ask: hosts, origins of web pages, keys; how large a request may be, and how slow."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_mlx.serve.errors import ApiError, response_of
from dflash_mlx.serve.hosts import host_of, may_call

HEALTH = "/health"  # which needs no key

Check = Callable[[Scope], "ApiError | None"]


class CheckMiddleware:
    """Lets requests through that a check has nothing against."""

    def __init__(self, app: ASGIApp, check: Check) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the refusal, or pass on."""
        refused = self._check(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await response_of(refused, scope["path"])(scope, receive, send)


class CallerCheck:
    """Refuses requests for other hosts, and from web pages that were not named.

    hosts, origins: that are allowed besides this machine's own.
    """

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        self._hosts = {host.lower() for host in hosts}
        self._origins = {origin.lower() for origin in origins}

    def __call__(self, scope: Scope) -> ApiError | None:
        """Why a request is refused, None where it is not."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not may_call(host, self._hosts):
            what = f"the host {host_of(host)[:200]!r} is not this server"
            return ApiError(403, f"{what}; start it with --allow-host to change that")
        origin = headers.get("origin")
        if origin is None or origin.lower() in self._origins:
            return None
        if origin.lower() == f"{scope['scheme']}://{host.lower()}":
            return None  # a page of ours, if we had one
        what = f"web pages of {origin[:200]!r} may not use this server"
        return ApiError(403, f"{what}; start it with --allow-origin to change that")


class KeyCheck:
    """Refuses requests without the key; None asks for none."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key)

    def __call__(self, scope: Scope) -> ApiError | None:
        """Why a request is refused, None where it is not. The time it takes says nothing."""
        if self._digest is None or scope["path"] == HEALTH:
            return None
        headers = Headers(scope=scope)
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer if kind.lower() == "bearer" else ""]
        fits = [hmac.compare_digest(_digest(each), self._digest) for each in given]
        if any(fits):
            return None
        what = "the key is missing or wrong; send it as Authorization: Bearer or x-api-key"
        return ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    """All of one length, so that comparing them tells nothing of the key's."""
    return sha256(key.encode("latin-1", "replace")).digest()


class BodyLimitMiddleware:
    """Ends requests that are larger than `most` bytes, or take longer than `seconds` to come."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole request, then pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            stated = Headers(scope=scope).get("content-length", "")
            if stated.isdecimal() and (len(stated) > 15 or int(stated) > self._most):
                raise self._too_large()
            whole = await asyncio.wait_for(self._read(receive), self._seconds)
        except asyncio.TimeoutError:
            refused = ApiError(408, f"the request did not come within {self._seconds:g} s")
        except ApiError as error:
            refused = error
        else:
            if whole is not None:
                await self._app(scope, _again(whole, receive), send)
            return
        refused.headers["Connection"] = "close"
        await response_of(refused, scope["path"])(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """All of the body; None where the client has left."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        what = f"the request is larger than {self._most / 10**6:g} MB"
        return ApiError(413, f"{what}; send less, or start the server with a larger --body-mb")


def _again(whole: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Gives out the body once, then what else comes."""
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": whole, "more_body": False}

    return read


class OuterMiddleware:
    """The outermost: counts responses; a fault of ours is a JSON error, and noted.

    counted: is given path and status. fault: notes an exception and makes an error of it.
    """

    def __init__(
        self,
        app: ASGIApp,
        counted: Callable[[str, int], None],
        fault: Callable[[Exception], ApiError],
    ) -> None:
        self._app, self._counted, self._fault = app, counted, fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at what comes back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
