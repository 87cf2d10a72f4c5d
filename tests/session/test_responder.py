"""Requests on a tiny pair: turns reuse caches, and the worker runs, cancels and reports them."""

import threading
from dataclasses import replace

import pytest

from dflash_mlx.client import (
    DecodeConfig,
    Delta,
    DFlashError,
    Ended,
    Failed,
    Prefilled,
    Question,
    Responder,
    SamplingConfig,
    Worker,
)
from dflash_mlx.drafters.experience import Experience
from dflash_mlx.models.load import load
from dflash_mlx.verifier import pass_times
from dflash_mlx.verifier.pass_times import PassTimes
from support.models import TEMPLATE, write_drafter, write_model

THINKING = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
CONFIG = DecodeConfig(max_tokens=12, method="dflash")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    model = write_model(root / "model", max_position_embeddings=400)
    return load(str(model), str(write_drafter(root / "drafter")))


@pytest.fixture
def responder(pair):
    return Responder(pair)


def request(*texts, **settings):
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))
    return Question(messages, None, replace(CONFIG, **settings))


def answer(responder, asked):
    """The text of an answer and its statistics."""
    deltas = list(responder.answer(asked))
    return "".join(delta.text for delta in deltas), deltas[-1].statistics


def test_a_delta_says_which_token_stood_before_it(responder):
    first, *others = deltas = list(responder.answer(request("hello")))
    prompt = responder.pair.tokenizer.encode("\n")
    assert first.anchor == prompt[-1]
    assert [delta.anchor for delta in others] == [delta.tokens[-1] for delta in deltas[:-1]]


@pytest.mark.parametrize(
    ("settings", "reuses"),
    [
        ({}, True),
        ({"max_tokens": 5, "stop": ("q",), "sampling": SamplingConfig(0.5, seed=1)}, True),
        ({"method": "ngram"}, False),
        ({"sampling": SamplingConfig(0.5)}, True),  # drafts are drawn by it
    ],
)
def test_caches_are_kept_unless_drafting_itself_changes(responder, settings, reuses):
    text, first = answer(responder, request("hello"))
    assert text == answer(Responder(responder.pair), request("hello", method="none"))[0]
    follow_up = request("hello", text, "on", **settings)
    again, second = answer(responder, follow_up)
    assert second.reused_tokens >= first.prompt_tokens if reuses else not second.reused_tokens
    assert second.generated_tokens <= follow_up.config.max_tokens
    if "sampling" not in settings:
        assert answer(Responder(responder.pair), follow_up)[0] == again
    _, third = answer(responder, follow_up)
    assert third.reused_tokens > 0


@pytest.mark.parametrize("template", [TEMPLATE, THINKING])
def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path, template):
    responder = Responder(load(str(write_model(tmp_path / "model", template=template))))
    whole, _ = answer(responder, request("hello", method="none"))
    half, _ = answer(responder, request("hello", method="none", max_tokens=5))
    rest, told = answer(responder, request("hello", half, method="none", max_tokens=7))
    assert half + rest == whole and len(rest) < len(whole)
    assert told.reused_tokens > 0, "and little of it is read again"


def test_a_call_that_is_given_up_and_an_idle_job_at_the_end_leave_nothing_open():
    heard, held = [], threading.Event()
    worker = Worker(heard.extend)
    worker.call(held.wait)
    given_up = worker.call(lambda: None)
    assert given_up.cancel()
    closed = []

    def measure(job):
        try:
            while True:
                yield "step"
        finally:
            closed.append(job)

    idle = worker.run(measure, idle=True)
    held.set()
    assert idle.begun.wait(60) and worker.call(lambda: 5).result(60) == 5
    assert worker.close(60) and closed == [idle]
    assert heard[-1][0] is idle and isinstance(heard[-1][1], Ended)


def test_a_thought_that_the_template_opens_is_opened_in_the_text(tmp_path):
    pair = load(str(write_model(tmp_path / "thinking", template=THINKING)))
    text, _ = answer(Responder(pair), request("hello", method="none"))
    assert text.startswith("<think>")
    assert not text[7:].startswith("<think>")


def test_passes_are_timed_once(pair, monkeypatch):
    measured, heard, times = [], [], PassTimes((1, 2), (0.25, 0.5))

    def measuring(target):
        measured.append(target)
        yield 2
        yield 2
        return times

    monkeypatch.setattr(pair.target, "pass_times", None)
    monkeypatch.setattr(pass_times, "measuring", measuring)
    monkeypatch.setattr(pass_times, "keep_text", lambda file, text: None)
    for again in (True, False):
        heard += pair.calibrating(again)
        assert pair.target.pass_times is times
    assert len(measured) == 1 and heard == [(1, 2), (2, 2)]


def test_what_is_asked_for_is_measured_though_the_disk_had_times_and_sessions_plan_with_it(
    pair, monkeypatch
):
    pair, times = replace(pair, learned={}), PassTimes((1, 96), (0.25, 0.5))
    asked = request("hello", method="ngram", max_tokens=4)
    answer(Responder(pair), asked)  # learns from its own rounds
    monkeypatch.setattr(pair.target, "pass_times", PassTimes((1, 2), (1.0, 1.0)))
    monkeypatch.setattr(pair.target, "was_timed", False)
    monkeypatch.setattr(pass_times, "keep_text", lambda file, text: None)
    monkeypatch.setattr(pass_times, "measuring", lambda target: (yield 1) or times)
    pair.calibrate(again=True)
    assert pair.target.pass_times is times
    answer(Responder(pair), asked)
    (experience,) = (each for each in pair.learned.values() if isinstance(each, Experience))
    assert experience.times.timed is times


# The worker


class Heard:
    """A worker with a list of its events; `cancels` says at which one a job is cancelled."""

    def __init__(self, cancels=lambda event: False):
        self.events, self._over = [], threading.Condition()
        self._cancels, self._ended = cancels, 0
        self.worker = Worker(lambda news: [self.post(*each) for each in news])

    def post(self, job, event):
        if self._cancels(event):
            job.cancelled.set()
        with self._over:
            self.events.append((job, event))
            self._ended += isinstance(event, Ended | Failed)
            self._over.notify()

    def wait(self, jobs):
        """Until so many jobs are over; then the worker does a last thing, and ends."""
        with self._over:
            assert self._over.wait_for(lambda: self._ended == jobs, 60)
        last = []
        assert self.worker.close(60, lambda: last.append(threading.current_thread().name))
        assert last == ["worker"]

    def of(self, job):
        return [event for one, event in self.events if one is job]


def is_delta(event):
    return isinstance(event, Delta)


def test_jobs_run_in_order_and_each_ends_once(responder):
    hello = request("hello")
    whole, _ = answer(Responder(responder.pair), hello)
    heard, asked = Heard(), [hello, request("x" * 500), request("hello", block_size=99), hello]
    jobs = [heard.worker.run(lambda job, r=r: responder.answer(r, job)) for r in asked]
    heard.wait(4)
    assert [job for job, event in heard.events if isinstance(event, Ended | Failed)] == jobs
    for job, value in zip(jobs[1:3], ("400", "99"), strict=True):
        (failed,) = heard.of(job)
        assert isinstance(failed.error, DFlashError) and value in str(failed.error)
    for job in (jobs[0], jobs[3]):
        *_, delta, ended = events = heard.of(job)
        assert "".join(event.text for event in events if is_delta(event)) == whole
        assert isinstance(events[0], Prefilled)
        assert (delta.finish_reason, ended) == ("length", Ended())


@pytest.mark.parametrize(
    "cancels", [lambda e: isinstance(e, Prefilled) and e.tokens == 128, is_delta]
)
def test_a_cancelled_job_ends_before_its_next_pass_and_keeps_what_it_computed(pair, cancels):
    """Cancelled in its prefill, or between two rounds; the same request then goes on from there."""
    asked, responder = request("x" * 200, prefill_step=64), Responder(pair)
    whole, _ = answer(Responder(pair), asked)
    heard = Heard(cancels)
    first = heard.worker.run(lambda job: responder.answer(asked, job))
    second = heard.worker.run(lambda job: responder.answer(asked))  # hears of no prefill
    heard.wait(2)
    assert sum(map(is_delta, heard.of(first))) == (cancels is is_delta)
    assert heard.of(first)[-1] == Ended()
    *deltas, _ = heard.of(second)
    assert deltas[0].statistics.reused_tokens >= 128
    assert whole.startswith("".join(delta.text for delta in deltas))


def test_a_job_cancelled_while_it_waits_is_never_begun():
    heard, hold, called = Heard(), threading.Event(), []

    def work(action):
        called.append(action)
        yield action()

    first = heard.worker.run(lambda job: work(hold.wait))
    second = heard.worker.run(lambda job: work(hold.set))
    assert first.begun.wait(60) and not second.begun.is_set()
    second.cancelled.set()
    hold.set()
    heard.wait(2)
    assert heard.events == [(first, True), (first, Ended()), (second, Ended())]
    assert called == [hold.wait]
