"""Pictures at addresses: only https, only of public machines, within limits."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.vision import remote
from support.pictures import picture

PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1"),
    *("fd00::1", "::ffff:127.0.0.1", "100.64.0.1", "172.16.0.9"),
]


def refused(address: str, **more: float) -> str:
    with pytest.raises(DFlashError) as found:
        remote.fetch(address, **more)
    return str(found.value)


@pytest.mark.parametrize(
    "address",
    [
        *("http://example.com/a.png", "ftp://example.com/a.png", "https://", "https:///a.png"),
        *("https://user@example.com/a.png", "https://example.com:port/", "https://[::1"),
    ],
)
def test_what_is_no_https_address_is_refused(monkeypatch, address):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert address in refused(address)


@pytest.mark.parametrize("place", PRIVATE)
def test_a_name_that_leads_to_a_machine_that_is_not_public_is_refused_unasked(monkeypatch, place):
    found = [(0, 0, 0, "", ("93.184.216.34", 443)), (0, 0, 0, "", (place, 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_connection", None)
    assert place in refused("https://pictures.example/a.png")


class Answer:
    """A machine that answers every request with these bytes, without TLS."""

    def __init__(self, *parts: bytes) -> None:
        self._parts, self.asked = parts, b""
        self.place = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        taken, _ = self.place.accept()
        with taken:
            self.asked = taken.recv(10_000)
            try:
                for part in self._parts:
                    taken.sendall(part)
            except OSError:  # the other side has heard enough
                pass


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Answer]]:
    """Makes a machine that is public, as far as look-ups go, and whose TLS is none."""
    made: list[Answer] = []

    def begin(*parts: bytes) -> Answer:
        made.append(Answer(*parts))
        return made[-1]

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        assert place == ("93.184.216.34", 443)
        return socket.create_connection(made[-1].place.getsockname(), 10)

    public = [(0, 0, 0, "", ("93.184.216.34", 443))]
    own = SimpleNamespace(getaddrinfo=lambda *_, **__: public, create_connection=connect)
    own.SOCK_STREAM = socket.SOCK_STREAM
    monkeypatch.setattr(remote, "socket", own)
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", lambda self, plain, **_: plain)
    yield begin
    for each in made:
        each.thread.join(10)
        each.place.close()


def response(body: bytes, head: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 " + head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_a_picture_is_read_and_the_host_is_named(answering):
    machine = answering(response(picture()))
    assert remote.fetch("https://pictures.example/a%20b.png?c=d") == picture()
    machine.thread.join(10)
    assert machine.asked.startswith(b"GET /a%20b.png?c=d HTTP/1.1\r\nHost: pictures.example\r\n")


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([response(b"", b"302 Found\r\nLocation: https://127.0.0.1/")], "302"),
        ([response(b"", b"404 Not Found")], "404"),
        ([b"nonsense\r\n\r\n"], "cannot be read"),
        ([response(b"x" * 2000)], "2.0 kB"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 10**6], "and a picture may have"),
    ],
)
def test_what_leads_elsewhere_breaks_off_or_is_too_large_is_a_sentence(answering, parts, word):
    answering(*parts)
    assert word in refused("https://pictures.example/a.png", most=1000)


def test_a_machine_that_takes_too_long_is_given_up(answering):
    answering(response(b"x" * 900))
    assert "more than 0 s" in refused("https://pictures.example/a.png", patience=0.0)
