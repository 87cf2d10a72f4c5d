"""A link between the ranks of one machine that takes its time, and counts: a TCP proxy.

Every byte that goes through arrives `latency` seconds later at the earliest, and no sooner than a
line of `rate` bytes a second would have carried all before it. What was sent is counted by the
place that it was sent to, in both directions together.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from queue import SimpleQueue

PORT = struct.Struct("!H")  # what a connection through `anywhere` begins with
_CHUNK = 1 << 16


class SlowLink:
    """latency: seconds one way. rate: bytes a second in each direction of each connection."""

    def __init__(self, latency: float, rate: float) -> None:
        self.latency, self.rate = latency, rate
        self.sent: Counter[str] = Counter()
        self.anywhere = self._listen(None, "control")

    def to(self, port: int, name: str) -> int:
        """The port that leads to `port` of this machine; name: what it is counted as."""
        return self._listen(port, name)

    def _listen(self, port: int | None, name: str) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(server, port, name), daemon=True).start()
        return int(server.getsockname()[1])

    def _accept(self, server: socket.socket, port: int | None, name: str) -> None:
        while True:
            near, _ = server.accept()
            with suppress(OSError):
                there = PORT.unpack(near.recv(PORT.size))[0] if port is None else port
                far = _reach(there)
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._carry(near, far, name)
                self._carry(far, near, name)

    def _carry(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        waiting: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

        def read() -> None:
            free, data = 0.0, b"x"
            while data:
                try:
                    data = source.recv(_CHUNK)
                except OSError:
                    data = b""
                self.sent[name] += len(data)
                free = max(free, time.monotonic()) + len(data) / self.rate
                waiting.put((free + self.latency, data))

        def write() -> None:
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                with suppress(OSError):
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        return
                    sink.sendall(data)

        for action in (read, write):
            threading.Thread(target=action, daemon=True).start()


def _reach(port: int, seconds: float = 30.0) -> socket.socket:
    """A connection to who listens there, as soon as somebody does."""
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
