"""Requests that mean no good: a JSON error of the API's shape, and other streams undisturbed."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time

import httpx2 as httpx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.serve import guard
from dflash_mlx.serve.errors import ApiError
from support.fuzzed_api import attack
from support.serving import (
    CHAT,
    CLIENT,
    MESSAGES,
    MODEL,
    TEXTS,
    actor_pair,
    chat_body,
    serving,
    user,
)

PAGE = "https://chat.example"
FOREIGN = {
    "Host": ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""),
    "Origin": ("http://evil.example", "null", "http://localhost:1"),
}


@pytest.fixture(scope="module")
def server():
    with serving(lambda prompt: "so", body_mb=0.2, idle=0.3, connections=20) as server:
        yield server


@pytest.fixture(scope="module")
def locked():
    with serving(lambda prompt: "so", key=("s3cret",), allow_origin=(PAGE,)) as server:
        yield server


def text(body: object) -> bytes:
    return json.dumps(body).encode()


def asking(**fields: object) -> bytes:
    return text(chat_body(**fields))


DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
FUNCTION = {"name": "f", "parameters": {"x": 5}}
HOSTILE = {
    **{"no JSON": b"{", "nothing": b"", "a number": b"5", "a list": b"[]"},
    "invalid UTF-8": asking()[:-2] + b"\xff\xfe}",
    "deep JSON": DEEP,
    "deep JSON in a field": asking(chat_template_kwargs={"x": 1}).replace(b"1", DEEP),
    "deep JSON in a tool": asking(tools=[{"type": "function", "function": FUNCTION}]).replace(
        b"5", DEEP
    ),
    "half a surrogate pair": asking(messages=user("\ud800")),
    "half a pair in a tool": asking(tools=[{"type": "function", "function": {"name": "\udfff"}}]),
    "half a pair in a stop text": asking(stop=["\ud800"]),
    "half a pair in a name": asking(model="\ud800"),
    "half a pair in a key": asking(**{"\ud800": 1}),
    "NaN": asking(temperature=float("nan")),
    "infinity": asking(temperature=float("inf")),
    "a number of 9,000 digits": asking(seed="X").replace(b'"X"', b"9" * 9000),
    "10,000 stop texts": asking(stop=[str(i) for i in range(10_000)]),
    "10,000 messages": asking(messages=user("a") * 10_000),
    "a prompt of tokens that are none": text({"model": MODEL, "prompt": [2**70]}),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_body_of_no_sense_is_refused(server, body):
    for path in (CHAT, TEXTS, MESSAGES):
        found = server.post(path, body)
        expected = {413} if len(body) > 200_000 else {400, 404}
        assert found.status_code in expected, found.text
        told = found.json()["error"]
        assert told["message"] and ("param" in told) == (path != MESSAGES)


@pytest.mark.parametrize("size", ["stated", "not stated"])
def test_a_body_that_is_too_large_is_not_read_to_its_end(server, size):
    def endless():
        while True:
            yield b" " * 10_000

    headers = {"Content-Length": str(10**12)} if size == "stated" else {}
    headers["Content-Type"] = "application/json"
    with contextlib.suppress(httpx.WriteError):
        found = CLIENT.post(server.url + CHAT, content=endless(), headers=headers)
        assert found.status_code == 413 and "0.2 MB" in found.json()["error"]["message"]
    assert server.chat(max_tokens=1).status_code == 200


def test_names_that_were_made_to_lead_here_and_pages_that_are_not_named_are_refused(server):
    for header, values in FOREIGN.items():
        for value in values:
            found = server.post(CHAT, chat_body(), headers={header: value})
            assert (found.status_code, "error" in found.json()) == (403, True)
            assert "access-control-allow-origin" not in found.headers
    for host in ("127.0.0.1", "[::1]:80", "localhost", "LOCALHOST:8080"):
        assert server.get("/health", headers={"Host": host}).status_code == 200
    form = {"Content-Type": "text/plain"}  # as a page may send unasked
    assert server.post(CHAT, text(chat_body()), headers=form).status_code == 400


def test_a_page_that_is_named_may_ask_and_is_told_so(locked):
    asks = {"Access-Control-Request-Method": "POST"}
    asked = locked.get(CHAT, "OPTIONS", headers={"Origin": PAGE, **asks})
    key = {"Origin": PAGE, "Authorization": "Bearer s3cret"}
    found = locked.post(CHAT, chat_body(), headers=key)
    other = locked.get(CHAT, "OPTIONS", headers={"Origin": "https://x.example", **asks})
    assert (asked.status_code, found.status_code, other.status_code) == (200, 200, 403)
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert found.headers["access-control-allow-origin"] == PAGE


def test_the_right_key_opens_both_ways_a_wrong_one_none_and_health_needs_none(locked):
    wrong = [
        *({"Authorization": key} for key in ("Bearer wrong", "Basic s3cret", "Bearer s3cret2")),
        *({"x-api-key": key} for key in ("", "S3CRET", b"\xff\xfe", "s" * 60_000)),
    ]
    for headers in ({}, *wrong):
        for path in (CHAT, MESSAGES):
            found = locked.post(path, chat_body(), headers=headers)
            assert found.status_code in (401, 400)  # 400: a head that is longer than any may be
            assert "s3cret" not in found.text and "error" in found.json()
            if path == MESSAGES and found.status_code == 401:
                assert found.json()["error"]["type"] == "authentication_error"
    for headers in ({"Authorization": "bearer s3cret"}, {"x-api-key": "s3cret"}):
        assert locked.post(CHAT, chat_body(), headers=headers).status_code == 200
    assert locked.get("/health").status_code == 200
    for path in ("/metrics", "/v1/models", "/openapi.json"):
        assert locked.get(path).status_code == 401


@pytest.mark.parametrize("key", ["", "x" + "k" * 63, "k" * 63 + "x", "k" * 64, "k" * 9000])
def test_a_key_is_compared_as_a_digest_in_constant_time_and_not_kept(monkeypatch, key):
    compared, compare = [], hmac.compare_digest
    both = lambda *pair: (compared.append(pair), compare(*pair))[1]  # noqa: E731
    monkeypatch.setattr(guard.hmac, "compare_digest", both)
    known, headers = [*map(guard.digest, ("k" * 64, "other"))], [(b"x-api-key", key.encode())]
    scope = {"type": "http", "path": "/", "headers": headers}
    with contextlib.nullcontext() if key == "k" * 64 else pytest.raises(ApiError):
        guard.check_key(known, scope)
    assert [[len(each) for each in pair] for pair in compared] == [[32, 32]] * 4
    assert scope["state"]["user"] == (known[0].hex() if key == "k" * 64 else "")


HEADS = {
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "length": b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    "a long line": b"GET /" + b"a" * 100_000,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_what_is_no_http_is_refused_in_json(server, head):
    with connected(server) as place:
        with contextlib.suppress(OSError):
            place.sendall(head)
        said = read_all(place)
    assert said.startswith(b"HTTP/1.1 4") and b'"error"' in said


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(place: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := place.recv(65536):
            said += part
    return said


def test_connections_that_do_nothing_are_closed(server):
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{" % CHAT.encode()
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(connected(server)) for _ in range(4)]
        for place, sent in zip(places, (b"", whole[:30], whole, head), strict=True):
            place.sendall(sent)
        *_, said = [read_all(place) for place in places]  # until the server closes it
    assert said.startswith(b"HTTP/1.1 408") and b'"timeout_error"' in said, "its body did not come"


BODY = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"


@pytest.mark.parametrize("sent", ["", BODY], ids=["head", "body"])
def test_a_head_or_a_body_that_comes_byte_by_byte_gets_no_more_time(server, sent):
    with connected(server) as place:
        begin = time.monotonic()
        place.sendall(sent.encode())
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 10:
                place.sendall(b"a")
                place.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    if not place.recv(1):
                        break
        assert time.monotonic() - begin < 5


def test_too_many_connections_are_told_so(server):
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(connected(server)) for _ in range(21)]
        said = read_all(places[-1])
    assert said.startswith(b"HTTP/1.1 503") and b'"error"' in said
    server.until(lambda: not server.worker._open)


def test_a_reader_that_stands_still_is_left_and_others_go_on():
    pair = actor_pair(lambda prompt: "a" * 30_000, context_length=40_000)
    row = np.zeros(97, np.float32)
    row[pair.tokenizer.encode("a")[0]] = 60
    pair.target._row = lambda path: row  # as fast as can be
    with serving(pair, idle=0.3) as server:
        server.place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # of connections, too
        body = text(chat_body(max_tokens=30_000, stream=True, logprobs=True, top_logprobs=20))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as place:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            place.connect(("127.0.0.1", server.port))
            place.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            server.until(lambda: len(server.queue) == 1)
            assert server.chat(max_tokens=3).status_code == 200
            server.until(lambda: len(server.queue) == 0)


def test_paths_and_ways_to_ask_that_are_none_are_told_in_json(server):
    for path in ("/docs", "/v1", CHAT + "/x", MESSAGES + "/x"):
        found = server.get(path)
        assert (found.status_code, "error" in found.json()) == (404, True)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        found = server.get(CHAT, method)
        told = found.json()["error"]["message"]
        assert found.status_code == 405 and method in told and "send POST" in told


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_json_without_its_type_is_read_as_curl_sends_it(server, kind):
    body = json.dumps(chat_body()).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    assert httpx.post(server.url + CHAT, content=body, headers=headers).status_code == 200
    found = httpx.post(server.url + CHAT, content=b"a=b", headers=headers)
    assert found.status_code == 400 and "JSON" in found.json()["error"]["message"]
    page = {**headers, "Origin": "http://evil.example"}  # which needs no leave to post a form
    assert httpx.post(server.url + CHAT, content=body, headers=page).status_code == 403


def test_requests_of_all_kinds_made_from_the_served_schema_make_no_fault():
    with serving(lambda prompt: "so", DecodeConfig("none", max_tokens=3)) as server:
        counted = attack(server, 20)
    assert counted["requests"] >= 150
    assert counted["answered"] > 20 and counted["refused"] > 20
