"""Several answers at once: each reads as it does alone, with its own stops and figures."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from itertools import count

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.session.scheduler import UNUSED, Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support.decoding import Strict, finish
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.hybrids import target_of
from support.models import write_model
from support.pairs import full_pair
from support.toys import Letters, prompt_of

PROMPTS = [prompt_of(i, 7 + 9 * i) for i in range(5)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = Target(make_model("llama"), 64, "llama")
    model = drafter_folder(tmp_path_factory.mktemp("drafter"), [0, 1, 2], 1, target)
    return Pair(target, Letters(), (model,), "tiny")


def configs() -> list[DecodeConfig]:
    """By prompt; the last fills the context."""
    methods = ("dflash", "none", "ddtree", "ngram", "dflash")
    heat = (0.0, 0.0, 0.8, 0.0, 0.0)
    return [
        DecodeConfig(method, max_tokens=100 if i == 4 else 12, sampling=SamplingConfig(t, seed=i))
        for i, (method, t) in enumerate(zip(methods, heat, strict=True))
    ]


def test_every_answer_is_the_one_it_is_alone(pair):
    scheduler, begin = Scheduler(pair, observer=Strict()), time.perf_counter()
    asked = [scheduler.submit(p, c) for p, c in zip(PROMPTS, configs(), strict=True)]
    assert len(scheduler) == 5
    said, took = finish(scheduler), time.perf_counter() - begin
    for answering, prompt, config in zip(asked, PROMPTS, configs(), strict=True):
        alone = collect(Session(pair, config).stream(prompt))
        together = collect(iter(said[answering]))
        assert (together.tokens, together.text) == (alone.tokens, alone.text)
        assert together.finish_reason == answering.finish_reason == alone.finish_reason
        assert answering.length == len(prompt) + len(alone.tokens)
        read, decoded = answering.statistics.prefill_seconds, answering.statistics.decode_seconds
        assert read > 0 < decoded and read + decoded <= took
    assert asked[4].finish_reason == "context"


def test_no_more_answers_than_asked_for_are_in_one_pass(pair):
    scheduler = Scheduler(pair, most=2)
    for prompt in PROMPTS[:3]:
        scheduler.submit(prompt, configs()[1])
    scheduler.step()
    assert [len(scheduler.running), len(scheduler.waiting)] == [2, 1]
    assert len(finish(scheduler)) == 3


def test_those_that_draft_alike_share_a_drafter_and_unused_ones_do_not_heap_up(pair):
    scheduler = Scheduler(pair)
    config = DecodeConfig("dflash", block_size=4, max_tokens=1)
    for i in range(3 * UNUSED):
        sampling = SamplingConfig(0.5 + i / 100)
        scheduler.submit(PROMPTS[0], replace(config, sampling=sampling))
        finish(scheduler)
    assert len(scheduler.drafters) <= UNUSED + 1
    for prompt, heat in zip(PROMPTS, (0.0, 0.7, 0.0), strict=False):
        seeded = SamplingConfig(heat, seed=1)
        scheduler.submit(prompt, replace(config, sampling=seeded))
    scheduler.submit(PROMPTS[3], DecodeConfig("ddtree"))
    drafters = [each.drafter for each in scheduler.waiting]
    assert drafters[0] is drafters[1] is drafters[2] is not drafters[3]


def test_a_stop_ends_one_and_not_the_others(pair):
    config = replace(configs()[0], stop=())
    whole = collect(Session(pair, config).stream(PROMPTS[0]))
    scheduler = Scheduler(pair)
    stopped = scheduler.submit(PROMPTS[0], replace(config, stop=("never", whole.text[4])))
    other = scheduler.submit(PROMPTS[1], configs()[1])
    said = finish(scheduler)
    text = "".join(delta.text for delta in said[stopped])
    assert (text, stopped.finish_reason) == (whole.text[: whole.text.index(whole.text[4])], "stop")
    assert (said[stopped][-1].stop_text, said[other][-1].stop_text) == (whole.text[4], None)
    assert len(collect(iter(said[other])).tokens) == 12


def test_turns_go_on_from_what_any_of_them_has_read(pair):
    prefixes, config = PrefixCache(10**9), configs()[0]
    scheduler = Scheduler(pair, prefixes=prefixes)
    first = scheduler.submit(PROMPTS[2], config)
    said = collect(iter(finish(scheduler)[first])).tokens
    prompts = [[*PROMPTS[2], *said, 5], [*PROMPTS[2], 7], PROMPTS[0]]
    asked = [scheduler.submit(prompt, config) for prompt in prompts]
    told, before = finish(scheduler), prefixes.nbytes
    exact = [scheduler.submit(p, replace(config, exact=True)) for p in (prompts[0], PROMPTS[1])]
    finish(scheduler)
    assert prefixes.nbytes == before, "exact answers leave nothing, and use nothing"
    alone = [list(collect(Session(pair, config).stream(p)).tokens) for p in prompts]
    assert [list(collect(iter(told[each])).tokens) for each in asked] == alone
    held = len(PROMPTS[2]) + len(said) - 1
    reused = [each.statistics.reused_tokens for each in (*asked, *exact)]
    assert reused == [held, 25, 0, 0, 0]


def test_a_cancelled_answer_is_over(pair):
    scheduler = Scheduler(pair)
    first, second = (scheduler.submit(p, configs()[1]) for p in PROMPTS[:2])
    waiting = scheduler.submit(PROMPTS[2], configs()[1])
    scheduler.step()
    scheduler.cancel(first)
    scheduler.cancel(waiting)
    scheduler.cancel(waiting)
    assert [*finish(scheduler)] == [second]
    assert not scheduler.running and not scheduler.waiting


@pytest.mark.parametrize(("family", "method"), [("llama", "dflash"), ("falcon_h1", "ngram")])
def test_answers_to_one_prompt_read_it_once_and_are_those_that_they_are_alone(pair, family, method):
    pair = pair if family == "llama" else Pair(target_of(family), Letters())
    heats = [SamplingConfig(0.9, seed=i) for i in range(3)]
    configs = [DecodeConfig(method, max_tokens=9, prefill_step=16, sampling=each) for each in heats]
    prompt = PROMPTS[4]
    scheduler = Scheduler(pair, observer=Strict(), prefixes=PrefixCache(10**9))
    asked = [scheduler.submit(prompt, config) for config in configs]
    said = finish(scheduler)
    for answering, config in zip(asked, configs, strict=True):
        alone = collect(Session(pair, config).stream(prompt))
        assert collect(iter(said[answering])).tokens == alone.tokens
    reused = [each.statistics.reused_tokens for each in asked]
    assert reused == [0, len(prompt) - 1, len(prompt) - 1]


@pytest.mark.parametrize("where", ["take", "put"])
def test_a_fault_of_the_prefixes_ends_nobody_else(pair, where):
    """Taking one over fails that sequence alone; what cannot be kept is read again later."""
    prefixes = PrefixCache(10**9)
    scheduler = Scheduler(pair, observer=Strict(), prefixes=prefixes)
    first = scheduler.submit(PROMPTS[0], configs()[1])
    scheduler.step()
    setattr(prefixes, where, lambda *_: 1 / 0)
    second = scheduler.submit(PROMPTS[1], configs()[1])
    said = finish(scheduler)
    assert len(first.state.tokens) == len(PROMPTS[0]) + 11
    if where == "take":
        assert isinstance(said[second][-1], ZeroDivisionError)
    else:
        assert len(collect(iter(said[second])).tokens) == 12


@pytest.mark.parametrize(("config", "ahead"), [(configs()[1], 1), (configs()[3], 0)])
def test_a_lone_plain_answer_runs_one_round_ahead_and_drafts_and_two_do_not(pair, config, ahead):
    scheduler = Scheduler(pair)
    lone = scheduler.submit(PROMPTS[0], config)
    while not lone.statistics.generated_tokens:
        scheduler.step()
    assert len(lone.rounds) == ahead
    scheduler.submit(PROMPTS[1], configs()[1])
    for _ in range(3):
        scheduler.step()
    assert not lone.rounds


def test_a_session_belongs_to_one_thread_and_says_so(pair):
    session, said = Session(pair, configs()[1]), []
    list(session.stream(prompt_of(0, 9)))

    def ask() -> None:
        try:
            list(session.stream(prompt_of(0, 9)))
        except DFlashError as error:
            said.append(str(error))

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert len(said) == 1 and "for each thread" in said[0]


LEFT_OPEN = """
from dflash_mlx import DecodeConfig, load, stream
deltas = stream(load(sys.argv[1]), "hello", DecodeConfig(method="none"))
next(deltas)
"""


def test_a_stream_that_is_open_when_the_program_ends_says_nothing(tmp_path):
    folder = write_model(tmp_path / "model")
    command = [sys.executable, "-c", "import sys" + LEFT_OPEN, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_answer_that_cannot_be_told_ends_alone(pair):
    scheduler = Scheduler(pair)
    bad, good = (scheduler.submit(prompt_of(i), configs()[1]) for i in (1, 2))
    bad.text.take = [].__getitem__
    said = finish(scheduler)
    assert [type(what) for what in said[bad]] == [TypeError]
    assert (
        collect(said[good]).tokens
        == collect(Session(pair, configs()[1]).stream(prompt_of(2))).tokens
    )


def test_the_last_delta_is_told_before_the_prefix_is_kept(pair):
    kept = []

    class Watched(PrefixCache):
        def put(self, state, target, drafter):
            kept.append(state.position)
            super().put(state, target, drafter)

    session = Session(pair, configs()[1], Watched())
    assert {len(kept) for _ in session.stream(prompt_of(1))} == {0}
    assert len(kept) == 1


def test_what_caches_take_is_found_once_by_passes_over_one_row(pair, monkeypatch):
    rows, forward = [], Target.forward

    def counting(target, ids, *rest):
        rows.append(ids.size)
        return forward(target, ids, *rest)

    monkeypatch.setattr(Target, "forward", counting)
    scheduler = Scheduler(pair, 10**9)
    for heat in (0.5, 0.6, 0.7):
        config = DecodeConfig("dflash", max_tokens=12, sampling=SamplingConfig(heat))
        scheduler.submit(prompt_of(1), config)
    assert rows == [1, 1]


# Log-probabilities of tokens: the target's own law, whatever was drafted and drawn.


def one_by_one(target: Target, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [T, V] after each token, by one pass over all of them."""
    logits, _ = target.forward(mx.array(tokens), target.new_cache(), Block(len(tokens)))
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("method", ["none", "dflash", "ddtree"])
@pytest.mark.parametrize(("heat", "exact"), [(0.0, False), (0.8, False), (0.0, True)])
def test_every_token_has_the_law_that_it_was_chosen_from(pair, method, heat, exact):
    sampling = SamplingConfig(heat, top_k=5, repetition_penalty=1.2, seed=1)
    config = DecodeConfig(method, max_tokens=20, exact=exact, logprobs=3, sampling=sampling)
    deltas = [*Session(pair, config).stream(PROMPTS[1])]
    laws = [law for delta in deltas for law in delta.logprobs]
    tokens = [law.token for law in laws]
    assert tokens == [token for delta in deltas for token in delta.tokens]
    expected = one_by_one(pair.target, [*PROMPTS[1], *tokens])[len(PROMPTS[1]) - 1 : -1]
    for law, row in zip(laws, expected, strict=True):
        assert law.logprob == pytest.approx(row[law.token], abs=1e-3)
        best = np.sort(row)[::-1][:3]
        assert [value for _, value in law.top] == pytest.approx(best, abs=1e-3)
        assert all(row[token] == pytest.approx(value, abs=1e-3) for token, value in law.top)


def test_answers_are_the_same_with_and_without_and_carry_nothing_unasked(pair):
    def run(logprobs: int | None):
        config = DecodeConfig("ddtree", max_tokens=20, logprobs=logprobs)
        return [*Session(pair, config).stream(PROMPTS[1])]

    with_them, without = run(0), run(None)
    assert collect(iter(with_them)).tokens == collect(iter(without)).tokens
    assert all(delta.logprobs == () for delta in without)
    assert all(len(d.logprobs) == len(d.tokens) for d in with_them)


def test_who_waits_for_what_another_reads_takes_nobodys_place(pair):
    scheduler = Scheduler(pair, prefixes=PrefixCache(10**8), most=2)
    first, same, other = (
        scheduler.submit(prompt, configs()[1]) for prompt in (PROMPTS[4], PROMPTS[4], PROMPTS[1])
    )
    scheduler._admit()
    assert scheduler.running == [first, other] and [*scheduler.waiting] == [same]
    said = finish(scheduler)
    assert same.statistics.reused_tokens >= len(PROMPTS[4]) - 1
    assert collect(said[same]).tokens == collect(said[first]).tokens


# Several targets in one scheduler


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    target = Target(make_model("llama", seed=7), 2000, "other")
    return Pair(target, Letters())


def test_answers_of_two_targets_are_those_of_each_alone_and_share_one_memory(pair, other):
    scheduler = Scheduler(observer=Strict(), prefixes=PrefixCache(10**9))
    asked = [(own, p, c) for p, c in zip(PROMPTS, configs(), strict=True) for own in (pair, other)]
    asked = [each for each in asked if each[0] is pair or each[2].method in ("none", "ngram")]
    size = scheduler.memory.bytes_of
    need = max(size(own.target, scheduler.drafter(c, own), 64) for own, _, c in asked)
    scheduler.memory.limit, most = 2 * need, [0, 0]
    sequences = [scheduler.submit(p, c, own) for own, p, c in asked]

    def look():
        running = sum(each.state.nbytes for each in scheduler.running)
        most[0] = max(most[0], running + scheduler.prefixes.nbytes)
        most[1] = max(most[1], len({each.target for each in scheduler.running}))

    said = finish(scheduler, look)
    for each, (own, prompt, config) in zip(sequences, asked, strict=True):
        alone = collect(Session(own, config).stream(prompt))
        assert collect(iter(said[each])).tokens == alone.tokens
    assert most[0] <= scheduler.memory.limit and most[1] == 2


def test_targets_have_equal_shares_of_the_time_since_they_run_together(pair, other, monkeypatch):
    clock, passes, forward = [0.0], Counter(), Target.forward_all

    def timed(target, *how):
        clock[0] += 3.0 if target is other.target else 1.0
        passes[target] += 1
        return forward(target, *how)

    monkeypatch.setattr(Target, "forward_all", timed)
    monkeypatch.setattr("dflash_mlx.session.scheduler.perf_counter", lambda: clock[0])
    scheduler, config = Scheduler(), DecodeConfig("none", max_tokens=50)
    scheduler.submit(PROMPTS[0], config, pair)
    for _ in range(10):
        scheduler.step()
    scheduler.submit(PROMPTS[1], config, other)
    for _ in range(24):
        scheduler.step()
    assert passes == {pair.target: 10 + 18, other.target: 6}


def test_a_target_reads_a_prompt_in_chunks_while_another_decodes(pair, other, monkeypatch):
    ticks = count()
    monkeypatch.setattr("dflash_mlx.session.scheduler.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(other.target, "pass_times", PassTimes((1, 101), (10.0, 20.0)))
    scheduler, config = Scheduler(), DecodeConfig("none", max_tokens=50)
    decoding = scheduler.submit(PROMPTS[0], config, pair)
    scheduler.step()
    reading = scheduler.submit(prompt_of(9, 900), config, other)
    read = []
    for _ in range(10):
        before = reading.state.position
        told = {each for each, _ in scheduler.step()}
        read.append(reading.state.position - before)
        assert told == (set() if read[-1] else {decoding})
    assert sorted(read) == [0] * 5 + [75] * 5, "as much as makes a pass 1.75 times as long"
    scheduler.cancel(decoding)
    scheduler.step()
    assert reading.state.position > 5 * 75 + 400, "nobody waits any more"


@pytest.mark.parametrize("method", ["none", "dflash", "d2sd", "specdiff", "eagle3", "mtp", "lm"])
def test_a_target_that_is_forgotten_is_held_by_nothing(tmp_path, other, method):
    pair = full_pair(tmp_path, Target(make_model("llama", seed=8), 64, "third"), Letters())
    scheduler = Scheduler(memory=10**9, prefixes=PrefixCache(10**9))
    for own, used in ((pair, method), (other, "none")):
        for prompt in PROMPTS[:2]:
            scheduler.submit(prompt, DecodeConfig(used, max_tokens=4), own)
    finish(scheduler)
    target, kept = weakref.ref(pair.target), scheduler.prefixes.nbytes
    calls = 1
    while not scheduler.forget(pair.target):
        calls += 1
    assert calls == 3, "one for each prefix, and one for the rest"
    assert 0 < scheduler.prefixes.nbytes < kept
    del pair, own
    gc.collect()
    assert target() is None
