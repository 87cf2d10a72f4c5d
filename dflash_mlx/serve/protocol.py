"""Connections: not too many, none that does nothing for long, and refusals in JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_mlx.serve.errors import ApiError, body_of, encoded


class LimitedProtocol(H11Protocol):
    """uvicorn's, with the limits that it does not have; see `limited`.

    A client has `idle` seconds for the head of a request, from its first byte or the opening of
    the connection on, and to go on reading an answer where it has stopped. (Between two requests
    uvicorn itself waits that long.)
    """

    most = 512
    idle = 60.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it in, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(ApiError(503, f"there are {self.most} connections; ask again later"))
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that comes byte by byte does not get more time."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        self._go_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(self.idle, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        self._go_on()

    def on_response_complete(self) -> None:
        """As there, with a new request that may be in the making."""
        super().on_response_complete()
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error in JSON."""
        self._refuse(ApiError(400, f"this is no HTTP request ({msg.rstrip('.')})"))

    def _wait_for_head(self) -> None:
        self._head = self._head or self.loop.call_later(self.idle, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _refuse(self, error: ApiError) -> None:
        """Say why, and close; without h11, which may be in any state."""
        body = encoded(body_of(error, ""))
        phrase = {400: "Bad Request", 503: "Service Unavailable"}[error.status]
        head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(head.encode() + body)
        self.transport.close()


def limited(most: int, idle: float) -> type[LimitedProtocol]:
    """The protocol with these limits; a class, because uvicorn makes one for each connection."""
    return type("Protocol", (LimitedProtocol,), {"most": most, "idle": idle})
