"""Who is let in, who leaves, and how a server ends."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import httpx2 as httpx
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.serve.settings import ServeConfig
from support.serving import MODEL, actor_pair, chat_body, post, serving, user

CHAT = "/v1/chat/completions"
LONG = "a" * 3000


@pytest.fixture
def pair(tmp_path):
    return actor_pair(tmp_path / "actor", lambda prompt: LONG if "long" in prompt else "so")


@contextlib.contextmanager
def streaming(server, text="long"):
    """A stream whose first event was read."""
    body = chat_body(text, stream=True, max_tokens=3000)
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def begun(server) -> int:
    return len(server.queue.worker._open)


def test_answers_that_find_no_place_wait_and_further_ones_are_told_when_to_come_back(pair):
    with serving(pair, parallel=1, queue=1) as server:
        pair.target.gate.clear()
        found: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda: found.append(post(server, CHAT, chat_body())))
            for _ in range(2)
        ]
        for each in asking:
            each.start()
        server.until(lambda: len(server.queue) == 2)
        assert (server.queue.waiting, begun(server)) == (1, 1) or begun(server) <= 2
        refused = post(server, CHAT, chat_body())
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        twice = post(server, "/v1/messages", {"model": MODEL, "max_tokens": 5,
                                              "messages": user("a")})  # fmt: skip
        assert twice.json()["error"]["type"] == "rate_limit_error"
        pair.target.gate.set()
        for each in asking:
            each.join(20)
        assert [each.json()["choices"][0]["message"]["content"] for each in found] == ["so", "so"]
        assert post(server, CHAT, chat_body()).status_code == 200


def test_no_more_answers_than_allowed_are_decoded_at_once(pair):
    with serving(pair, parallel=2, queue=9) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streaming(server)) for _ in range(2)]
        waiting = threading.Thread(target=lambda: post(server, CHAT, chat_body()))
        waiting.start()
        server.until(lambda: len(server.queue) == 3)
        engine = server.queue.worker._scheduler
        server.until(lambda: len(engine.waiting) == 1)
        assert len(engine.running) == 2
        del streams
        stack.close()
        waiting.join(20)
        assert not waiting.is_alive()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_gone_before_the_next_step(pair, stream, monkeypatch):
    with serving(pair) as server, streaming(server) as other:
        worker, steps = server.queue.worker, []
        for name in ("cancel", "_cancel"):  # the event loop has seen it leave, the thread has heard
            act = getattr(worker, name)
            noted = lambda asked, act=act: (steps.append(worker.steps), act(asked))  # noqa: E731
            monkeypatch.setattr(worker, name, noted)
        body = json.dumps(chat_body("long", stream=stream, max_tokens=3000)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as place:
            place.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            server.until(lambda: begun(server) == 2)
        server.until(lambda: begun(server) == 1)
        assert steps[1] - steps[0] <= 1, "the one that ran"
        engine = server.queue.worker._scheduler
        server.until(lambda: len(engine.running) == 1 and not engine.waiting)
        assert next(other) is not None


def test_a_client_that_leaves_before_its_prompt_is_read_leaves_nothing(pair):
    with serving(pair) as server:
        pair.target.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=chat_body("long"), timeout=0.2)
        server.until(lambda: len(server.queue) == 0)
        pair.target.gate.set()
        server.until(lambda: begun(server) == 0)


def test_an_answer_that_fails_says_so_and_the_others_go_on(pair):
    with serving(pair, faults=True) as server, streaming(server) as other:
        scheduler = server.queue.worker._scheduler
        submit = scheduler.submit

        def failing(tokens, config, behind):
            sequence = submit(tokens, config, behind)
            sequence.rule.accept = lambda *_: 1 / 0
            return sequence

        scheduler.submit = failing
        found = post(server, CHAT, chat_body())
        assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
        told = [json.loads(line[6:]) for line in said_by(server, chat_body(stream=True))]
        assert told[-1]["error"]["type"] == "server_error"
        assert next(other) is not None
        assert all(isinstance(each, ZeroDivisionError) for each in server.faults)


def said_by(server, body) -> list[str]:
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=30) as response:
        return [line for line in response.iter_lines() if line.startswith("data: ")]


def test_a_fault_of_the_engine_ends_what_runs_and_new_answers_come(pair):
    with serving(pair, faults=True) as server:
        scheduler = server.queue.worker._scheduler
        scheduler.step = lambda: 1 / 0
        assert post(server, CHAT, chat_body()).status_code == 500
        assert server.queue.worker._scheduler is not scheduler
        assert post(server, CHAT, chat_body()).status_code == 200


def test_an_answer_that_does_not_fit_into_memory_is_refused_in_words(pair):
    with serving(pair) as server:
        engine = server.queue.worker._scheduler

        def too_large(sequence):
            raise DFlashError("an answer takes 9 GB", "ask for a shorter one")

        engine.memory.check = too_large
        found = post(server, CHAT, chat_body(stream=True))
    assert found.status_code == 400 and "9 GB" in found.json()["error"]["message"]


def test_at_the_end_nobody_is_let_in_and_answers_finish(pair):
    with serving(pair) as server:
        pair.target.gate.clear()
        with httpx.Client() as kept:
            assert kept.get(server.url + "/health").status_code == 200
            found: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: found.append(post(server, CHAT, chat_body())))
            asking.start()
            server.until(lambda: len(server.queue) == 1)
            server.end()
            server.until(lambda: server.queue._closing)
            late = kept.post(server.url + CHAT, json=chat_body())
        assert (late.status_code, late.json()["error"]["type"]) == (503, "server_error")
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        pair.target.gate.set()
        asking.join(20)
        server.thread.join(20)
        assert not server.thread.is_alive()
    assert found[0].json()["choices"][0]["message"]["content"] == "so"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_what_does_not_finish_in_time_is_ended_by_an_error_that_says_so(pair, path):
    with serving(pair, grace=0.1) as server:
        body = {"model": MODEL, "messages": user("long"), "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", server.url + path, json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.end()
            last = [line for line in lines if line][-1]
        server.thread.join(20)
        assert not server.thread.is_alive()
    error = json.loads(last.removeprefix("data: "))["error"]
    assert "shutting down" in error["message"]


def test_figures_are_told_to_prometheus(pair):
    with serving(pair) as server:
        post(server, CHAT, chat_body())
        post(server, CHAT, chat_body(n=0))
        httpx.get(server.url + "/no/such/path")
        page = httpx.get(server.url + "/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert lines["dflash_tokens_total"] == "3.0"
    assert lines['dflash_answers_total{ended="stop"}'] == "1.0"
    assert lines[f'dflash_responses_total{{path="{CHAT}",status="400"}}'] == "1.0"
    assert lines['dflash_responses_total{path="other",status="404"}'] == "1.0"
    assert lines["dflash_decoding"] == lines["dflash_waiting"] == "0.0"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("parallel", 0),
        ("queue", -1),
        ("memory_gb", 0),
        ("body_mb", float("inf")),
        ("idle", 0),
        ("grace", -1),
        ("host", "0.0.0.0"),
        ("host", "example.org"),
        ("key", ""),
        ("key", "a\nb"),
        ("allow_origin", ("chat.example",)),
    ],
)
def test_settings_of_no_sense_are_refused(setting, value):
    with pytest.raises(DFlashError) as found:
        ServeConfig(**{setting: value})
    assert found.value.setting == setting


def test_other_hosts_are_served_with_a_key():
    assert ServeConfig(host="0.0.0.0", key="k").key == "k"
    assert ServeConfig(host="::1").key is None
