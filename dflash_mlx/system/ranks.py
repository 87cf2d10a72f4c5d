"""The processes that share the work: how they meet, what they tell each other, how all end.

MLX moves the numbers. Beside it every follower has a plain TCP connection to rank 0, for JSON and
for signs of life. Nothing interrupts a collective operation that waits for a rank that is gone, so
it is a thread that notices, says why, and ends the process.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NoReturn

import mlx.core as mx

from dflash_mlx.core.findings import in_one_line

SILENCE = 20.0  # seconds without a sign of life after which a rank counts as gone
BAD_INPUT = 2  # exit code, as of every command
_BEATS = 4  # signs of life within that time
_MEETING = 28.0  # seconds until all have to be connected
_HEAD = struct.Struct("!I")  # length of a message; 0 is a sign of life
_MOST = 64 * 2**20  # bytes of a message
_ADDRESS = 64  # characters at most
_LAUNCHED = "MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"  # by MLX's launcher, by those of MPI
_SECRET = 16  # bytes
_ALARM = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, sys.argv[2].encode())
    os.kill(int(sys.argv[3]), signal.SIGKILL)
"""


@dataclass(eq=False)
class _Link:
    """The connection to one other rank, and what it has said."""

    rank: int
    socket: socket.socket
    heard: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    sending: threading.Lock = field(default_factory=threading.Lock)
    reader: threading.Thread | None = None


class Ranks:
    """All processes of one start, seen from one of them.

    group: MLX's. words: how this one was started. A rank that ends, or is silent for `silence`
    seconds, ends all with one sentence on stderr that names it.
    """

    def __init__(
        self, group: Any, links: Sequence[_Link], silence: float, words: Sequence[str] = ()
    ) -> None:
        self.group, self.words = group, [*words]
        self.rank, self.size = int(group.rank()), int(group.size())
        self._links = {link.rank: link for link in links}
        self._silence, self._over = silence, False
        self._ending = threading.Lock()
        for link in links:
            link.socket.settimeout(silence)
            link.reader = threading.Thread(target=self._listen, args=(link,), daemon=True)
            link.reader.start()
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def followers(self) -> range:
        """All ranks but the first."""
        return range(1, self.size)

    def tell(self, message: Any) -> None:
        """Say it to everybody that this rank is connected to: the first to all, others to it."""
        frame = _frame({"say": message})
        for link in self._links.values():
            try:
                with link.sending:
                    link.socket.sendall(frame)
            except OSError as error:
                self.stuck(f"rank {link.rank} cannot be reached ({error})")

    def hear(self, rank: int = 0, seconds: float | None = None) -> Any:
        """The next that `rank` says. queue.Empty where it says nothing for so long."""
        return self._links[rank].heard.get(timeout=seconds)

    def stuck(self, reason: str) -> NoReturn:
        """End all ranks, unless a reader soon knows better what has become of one."""
        time.sleep(1)
        self.fault(reason)

    def fault(self, reason: str, code: int = 1) -> NoReturn:
        """End all ranks with a sentence."""
        if not self._ending.acquire(blocking=False):
            time.sleep(_MEETING)  # another thread is at it
        for link in self._links.values():
            if link.sending.acquire(timeout=0.2):
                _offer(link.socket, _frame({"fault": reason, "code": code}))
        _leave(f"{reason}; all {self.size} ranks have ended", code)

    def failed(self, error: Exception, code: int) -> None:
        """What went wrong here. Where it only came of another rank's end, this never returns.

        Of the first rank it returns otherwise, so that it can say so itself.
        """
        if self.rank or isinstance(error, RuntimeError):  # as MLX's of a lost connection
            time.sleep(1)  # the first rank may have the same to say, or a reader something better
        if self.rank:
            kind = "" if code == BAD_INPUT else f"{type(error).__name__}: "
            self.fault(f"rank {self.rank} of {self.size} failed: {kind}{in_one_line(error)}", code)

    def end(self) -> None:
        """The work is done: of the first rank, all others end with it; others wait for that."""
        if self.rank:
            threading.Event().wait()
        self._over = True
        for link in self._links.values():
            with suppress(OSError), link.sending:
                link.socket.sendall(_frame({"end": True}))
        for link in self._links.values():
            assert link.reader is not None
            link.reader.join(2)

    def _listen(self, link: _Link) -> None:
        """Take in what a rank says, until it says no more."""
        other = f"rank {link.rank} of {self.size}"
        try:
            while True:
                message = _receive(link.socket)
                if "fault" in message:
                    self.fault(str(message["fault"]), int(message["code"]))
                if "end" in message:
                    os._exit(0)  # whatever the main thread waits for
                if "say" in message:
                    link.heard.put(message["say"])
        except TimeoutError:
            self._gone(f"{other} has given no sign of life for {self._silence:g} seconds")
        except (OSError, ValueError):
            self._gone(f"{other} has ended, or its connection has")

    def _gone(self, reason: str) -> None:
        if not self._over:
            time.sleep(0.2)  # in which MLX says what it has to say, a part of a line at a time
            self.fault(reason)

    def _beat(self) -> None:
        """Give signs of life."""
        while not self._over:
            for link in self._links.values():
                if link.sending.acquire(blocking=False):
                    _offer(link.socket, _HEAD.pack(0))
                    link.sending.release()
            time.sleep(self._silence / _BEATS)


def started_together() -> bool:
    """Whether a launcher started this process as one of several; MLX is asked only then.

    By itself MLX would look for MPI, and on some machines start it.
    """
    return any(name in os.environ for name in _LAUNCHED)


def meet(
    host: Callable[[], str], words: Sequence[str] = (), silence: float = SILENCE
) -> Ranks | None:
    """Connect to the ranks that were started together; None for a program that is alone.

    host: of the first rank, its address for the others, which learn it from there. RuntimeError or
    OSError where they cannot be reached; ends the process where they do not come.
    """
    with _within(_MEETING, "not all ranks have come"):
        group: Any = mx.distributed.init()
        return None if group.size() == 1 else _connect(group, host, words, silence)


def _connect(group: Any, host: Callable[[], str], words: Sequence[str], silence: float) -> Ranks:
    if group.rank() == 0:
        own = host()
        with socket.create_server((own, 0), backlog=group.size()) as server:
            secret = secrets.token_bytes(_SECRET)
            _share(group, own, server.getsockname()[1], secret, silence)
            links = _await(server, group.size(), secret)
    else:
        first, port, secret, silence = _share(group)
        link = _Link(0, socket.create_connection((first, port), timeout=silence))
        link.socket.sendall(secret + _HEAD.pack(group.rank()))
        links = [link]
    for each in links:
        each.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Ranks(group, links, silence, words)


@contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    """End this process where that takes longer; MLX lets no thread of ours run while it waits."""
    sentence = f"{what} within {seconds:g} seconds; see whether all were started\n"
    command = [sys.executable, "-S", "-c", _ALARM, str(seconds), sentence, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as alarm:
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # nor a handler
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            assert alarm.stdin is not None
            alarm.stdin.close()


def _share(
    group: Any, host: str = "", port: int = 0, secret: bytes = b"", silence: float = 0.0
) -> tuple[str, int, bytes, float]:
    """What the first rank gives, on all of them: a sum to which the others add nothing."""
    place = host.encode().ljust(_ADDRESS, b"\0"), secret.ljust(_SECRET, b"\0")
    own = [port, round(1000 * silence), *b"".join(place)]
    numbers = mx.distributed.all_sum(mx.array(own, mx.int32), group=group, stream=mx.cpu)
    found: Any = numbers.tolist()
    (port, silence), text = found[:2], bytes(found[2:])
    return text[:_ADDRESS].rstrip(b"\0").decode(), port, text[_ADDRESS:], silence / 1000


def _await(server: socket.socket, size: int, secret: bytes) -> list[_Link]:
    """A connection from every other rank; those that do not know the secret are closed."""
    links: dict[int, _Link] = {}
    while len(links) < size - 1:
        connection, _ = server.accept()
        connection.settimeout(1)
        with suppress(OSError):
            said = connection.recv(_SECRET + _HEAD.size, socket.MSG_WAITALL)  # or what has come
            if hmac.compare_digest(said[:_SECRET], secret) and len(said) == _SECRET + _HEAD.size:
                (rank,) = _HEAD.unpack(said[_SECRET:])
                links[rank] = _Link(rank, connection)
                continue
        connection.close()
    return list(links.values())


def _frame(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(len(body)) + body


def _offer(connection: socket.socket, frame: bytes) -> None:
    """Send it if that takes no waiting; with a time limit Python would wait, whatever the flag."""
    with suppress(OSError):
        if select.select([], [connection], [], 0)[1]:
            connection.send(frame, socket.MSG_DONTWAIT)


def _receive(connection: socket.socket) -> Any:
    """The next message, {} for a sign of life; OSError or ValueError where none can come."""
    (length,) = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(_exactly(connection, length)) if length else {}


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError("closed")
        data += part
    return bytes(data)


def _leave(sentence: str, code: int) -> NoReturn:
    """Say it where the program began to, and end without waiting for any thread."""
    with suppress(OSError, ValueError):
        print(f"{sentence}\n", end="", file=sys.__stderr__, flush=True)  # at once: MLX writes, too
    os._exit(code)
