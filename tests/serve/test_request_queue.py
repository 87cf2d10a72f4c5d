"""Who is let in, who leaves, and how a server ends."""

from __future__ import annotations

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import mlx.core as mx
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.engine.drafter import Proposal, Round
from dflash_mlx.serve.settings import ServeConfig
from dflash_mlx.session.scheduler import Scheduler
from support.serving import CHAT, MESSAGES, actor_pair, chat_body, message_body, said, serving


@pytest.fixture
def pair():
    return actor_pair(lambda prompt: "a" * 3000 if "long" in prompt else "so")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as threads:
        yield threads


@contextlib.contextmanager
def streaming(server, path=CHAT):
    """A long stream of which a word was read."""
    with server.streaming(path, message_body("long", max_tokens=3000)) as lines:
        next(line for line in lines if '"a"' in line)
        yield lines


def begun(server) -> int:
    return len(server.worker._open)


def test_answers_that_find_no_place_wait_and_further_ones_are_told_when_to_come_back(pair, threads):
    with serving(pair, parallel=1, queue=1) as server:
        pair.target.gate.clear()
        found = [threads.submit(server.chat) for _ in range(2)]
        server.until(lambda: len(server.queue) == 2)
        assert server.queue.waiting == 1 and begun(server) <= 2
        refused = server.chat()
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        for other in (refused, server.message()):
            assert other.json()["error"]["type"] == "rate_limit_error"
        pair.target.gate.set()
        assert [said(each.result(20)) for each in found] == ["so", "so"]
        assert server.chat().status_code == 200


def test_a_request_for_more_answers_than_there_are_places_is_not_told_to_come_back(pair):
    with serving(pair, parallel=1, queue=1) as server:
        assert [server.chat(n=n).status_code for n in (2, 3)] == [200, 400]


def test_no_more_answers_than_allowed_are_decoded_at_once(pair, threads):
    with serving(pair, parallel=2, queue=9) as server:
        with streaming(server), streaming(server):
            waiting = threads.submit(server.chat)
            scheduler = server.worker._scheduler
            server.until(lambda: len(scheduler.waiting) == 1)
            assert len(scheduler.running) == 2
        assert said(waiting.result(20)) == "so"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_gone_before_the_next_step(pair, stream, monkeypatch):
    with serving(pair) as server, streaming(server) as other:
        worker, steps = server.worker, []
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
        scheduler = worker._scheduler
        server.until(lambda: len(scheduler.running) == 1 and not scheduler.waiting)
        assert next(other) is not None


def test_a_client_that_leaves_before_its_prompt_is_read_leaves_nothing(pair):
    with serving(pair) as server:
        pair.target.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            server.post(CHAT, chat_body("long"), timeout=0.2)
        server.until(lambda: len(server.queue) == 0)
        pair.target.gate.set()
        server.until(lambda: begun(server) == 0)


def test_an_answer_that_fails_says_so_and_the_others_go_on(pair):
    with serving(pair, faults=True) as server, streaming(server) as other:
        scheduler = server.worker._scheduler
        submit = scheduler.submit

        def failing(*given):
            sequence = submit(*given)
            sequence.rule.accept = lambda *_: 1 / 0
            return sequence

        scheduler.submit = failing
        found = server.chat()
        assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
        with server.streaming(CHAT, chat_body()) as lines:
            last = [*lines][-1]
        assert json.loads(last[6:])["error"]["type"] == "server_error"
        assert next(other) is not None
        assert all(isinstance(each, ZeroDivisionError) for each in server.faults)


def test_a_fault_of_the_engine_ends_what_runs_and_new_answers_come(pair):
    with serving(pair, faults=True) as server:
        scheduler = server.worker._scheduler
        scheduler.step = lambda: 1 / 0
        assert server.chat().status_code == 500
        assert server.worker._scheduler is not scheduler
        assert server.chat().status_code == 200


def test_an_answer_that_does_not_fit_into_memory_is_refused_in_words(pair):
    with serving(pair) as server:
        memory = server.worker._scheduler.memory
        memory.limit, memory.bytes_of = 1, lambda *_: 9 * 10**9
        found = server.chat(stream=True)
    assert found.status_code == 400 and "9.00 GB" in found.json()["error"]["message"]


def test_at_the_end_nobody_is_let_in_and_answers_finish(pair, threads):
    with serving(pair) as server:
        pair.target.gate.clear()
        with httpx.Client(base_url=server.url) as kept:
            assert kept.get("/health").status_code == 200
            found = threads.submit(server.chat)
            server.until(lambda: len(server.queue) == 1)
            server.end()
            server.until(lambda: server.queue._closing)
            late = kept.post(CHAT, json=chat_body())
        assert (late.status_code, late.json()["error"]["type"]) == (503, "server_error")
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
        pair.target.gate.set()
        assert said(found.result(20)) == "so"
        server.thread.join(20)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_what_does_not_finish_in_time_is_ended_by_an_error_that_says_so(pair, path):
    with serving(pair, grace=0.1) as server:
        with streaming(server, path) as lines:
            server.end()
            last = [*lines][-1]
        server.thread.join(20)
        assert not server.thread.is_alive()
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_figures_are_told_to_prometheus(pair):
    with serving(pair) as server:
        server.chat()
        server.chat(n=0)
        server.get("/no/such/path")
        page = server.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert lines["dflash_tokens_total"] == "3.0"
    assert lines['dflash_answers_total{ended="stop"}'] == "1.0"
    assert lines[f'dflash_responses_total{{path="{CHAT}",status="400"}}'] == "1.0"
    assert lines['dflash_responses_total{path="other",status="404"}'] == "1.0"
    assert lines["dflash_decoding"] == lines["dflash_waiting"] == "0.0"


def test_a_line_of_watch_tells_rates_and_nothing_while_nothing_is_done(pair):
    with serving(pair) as server:
        metrics = server.service.queue.metrics
        assert metrics.line(2.0) == ""
        server.chat()
        assert "1.5 tokens per second" in (said := metrics.line(2.0)) and "1 answer done" in said
        assert metrics.line(2.0) == ""


def test_settings_of_no_sense_are_refused():
    wrong = {
        **{"port": [-1, 65536], "parallel": [0], "queue": [-1], "memory_gb": [0]},
        **{"body_mb": [float("inf")], "idle": [0], "grace": [-1, float("inf")], "messages": [0]},
        **{"host": ["0.0.0.0", "example.org"], "key": [("",), ("a", "b\n")], "connections": [0]},
        "allow_origin": [("chat.example",)],
    }
    for setting, values in wrong.items():
        for value in values:
            with pytest.raises(DFlashError) as found:
                ServeConfig(**{setting: value})
            assert found.value.setting == setting
    assert ServeConfig(host="0.0.0.0", key=("k",)).key == ("k",)
    assert ServeConfig(host="::1").key == ()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_answer_that_is_over_holds_neither_caches_nor_model_while_it_is_read(pair, path):
    with serving(pair) as server:
        pair.target.gate.clear()
        with server.streaming(path, message_body()) as lines:
            (reply,) = server.queue._streams
            assert reply.sequence is not None
            pair.target.gate.set()
            server.until(lambda: not len(server.queue))
            assert reply.sequence is reply.pair is None
            text = "\n".join(lines)
        assert '"s"' in text or '"so"' in text
        assert path == CHAT or '"message_start"' in text


def test_what_waits_for_a_slow_reader_has_no_rows_of_the_vocabulary(pair):
    sequence = Scheduler(pair).submit((1, 2), DecodeConfig("none"))
    sequence.start_clock()
    proposal, rows = Proposal(Tree.chain([5]), mx.zeros((1, 8))), mx.zeros((2, 8))
    sequence.rounds.append(Round(proposal, Accepted(proposal.tree, (0, 1), 6, logits=rows)))
    told = sequence.next_delta()
    assert told.tokens == (5, 6)
    assert told.proposal.q is told.accepted.logits is None
