"""Many answers at once: each is what it is alone, whatever the others do, and all fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support.decoding import Strict, answer, scheduler_of, sequence_of
from support.families import make_model
from support.rounding import Rounding
from support.schedules import TOYS, Request, excused, margin, problems, schedule_of, toy_pair
from support.schedules import toy_prompt as prompts
from support.toys import foretold, prompt_of

COUNT = 6


@pytest.fixture(scope="module")
def target():
    return Target(make_model("llama_sliding"), 1000, "llama")


def config_of(i: int) -> DecodeConfig:
    heat = 0.8 if i % 3 == 2 else 0.0
    sampling = SamplingConfig(temperature=heat, seed=i)
    return DecodeConfig(max_tokens=10 + 7 * i, prefill_step=16, sampling=sampling)


@pytest.fixture(scope="module")
def alone(target):
    """What each prompt is answered with."""
    prompts = [prompt_of(i, 5 + 11 * i) for i in range(COUNT)]
    return [(p, answer(target, NoDraft(), p, config_of(i))) for i, p in enumerate(prompts)]


def running(target, i, prompt, drafter) -> Sequence:
    return sequence_of(target, drafter, prompt, config_of(i))


def sequences(target, alone):
    drafters = [foretold(p, a, i) if i % 2 else NoDraft() for i, (p, a) in enumerate(alone)]
    return [running(target, i, p, drafters[i]) for i, (p, _) in enumerate(alone)]


def run(engine, waiting, rng, before_step=lambda: None):
    """Steps, with arrivals at random times, until all is said; what each sequence said."""
    said, failed = {id(each): [] for each in waiting}, {}
    arriving = list(waiting)
    while arriving or engine.running or engine.waiting:
        while arriving and (rng.random() < 0.4 or not (engine.running or engine.waiting)):
            engine.add(arriving.pop(0))
        before_step()
        for each, outcome in engine.step():
            if isinstance(outcome, Exception):
                failed[id(each)] = outcome
            elif outcome is not None:
                said[id(each)] += outcome.accepted.tokens
    return [said[id(each)] for each in waiting], [failed.get(id(each)) for each in waiting]


class Eager:
    """Everybody comes at once."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_each_alone(target, alone, seed):
    said, _ = run(
        scheduler_of(target, observer=Strict()),
        sequences(target, alone),
        np.random.default_rng(seed),
    )
    assert said == [words for _, words in alone]


@pytest.mark.parametrize("drafting", [True, False])
def test_near_ties_are_decided_as_alone(drafting):
    target, others = Rounding("llama", 0.01), [prompt_of(i, 9 + 11 * i) for i in range(3)]
    config = DecodeConfig(max_tokens=24, exact=True, prefill_step=16)
    plain = [answer(target, NoDraft(), prompt, config) for prompt in others]
    differ = 0
    for exact in (True, False):
        everyone = []
        for i, (prompt, words) in enumerate(zip(others, plain, strict=True)):
            drafter = foretold(prompt, words, i) if drafting else NoDraft()
            settings = replace(config, exact=exact)
            everyone.append(sequence_of(target, drafter, prompt, settings, in_company=True))
        said, failed = run(
            scheduler_of(target, observer=Strict()), everyone, np.random.default_rng(0)
        )
        assert not any(failed)
        assert not exact or said == plain
        differ += said != plain
    assert differ, "nobody would notice without it"


def test_the_memory_is_kept_and_who_has_no_room_waits(target, alone):
    engine = scheduler_of(target, observer=Strict())
    longest = max(engine.memory.bytes_of(target, NoDraft(), len(p) + len(a)) for p, a in alone)
    engine.memory.limit = 3 * longest
    most = [0, 0]

    def look():
        most[0] = max(most[0], engine.used)
        most[1] = max(most[1], len(engine.waiting))

    waiting = sequences(target, alone)
    said, _ = run(engine, waiting, Eager(), look)
    assert said == [words for _, words in alone]
    assert most[0] <= engine.memory.limit and most[1] >= 3


def test_prompts_that_are_not_read_yet_are_counted(target, alone):
    engine = scheduler_of(target)
    engine.memory.limit = engine.memory.bytes_of(target, NoDraft(), 300)
    for each in sequences(target, alone):
        engine.add(each)
    engine.step()
    assert engine.running and engine.waiting
    assert engine.used <= engine.memory.limit


def test_an_answer_that_cannot_fit_even_alone_is_refused_by_number(target, alone):
    engine = scheduler_of(target, memory=1000)
    with pytest.raises(DFlashError, match=r"takes .*B, more than the limit of 1\.0 kB"):
        engine.add(sequences(target, alone)[3])


STAGES = {  # what a sequence is asked for there
    "draft": "drafter.propose",
    "pass": "state.cache.begin",
    "layer": "state.cache.layers.1.update_and_fetch",
    "accept": "rule.accept",
    "commit": "state.commit",
    "cache": "state.cache.commit",
    "context": "state.context.append",
    "prompt": "state.commit_prompt",
}


def break_at(stage: str, broken: Sequence, calls: int) -> None:
    """Let it fail at its so many-th call."""
    left = calls

    def fails():
        nonlocal left
        left -= 1
        if left <= 0:
            raise RuntimeError("no")

    *path, name = STAGES[stage].split(".")
    where = broken
    for part in path:
        where = where[int(part)] if isinstance(where, list) else getattr(where, part)
    call = getattr(where, name)

    def failing(*given, **named):
        fails()
        return call(*given, **named)

    setattr(where, name, failing)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_one_that_fails_leaves_the_others_as_they_were(target, alone, stage, calls):
    everyone, victim, rng = sequences(target, alone), 3, np.random.default_rng(calls)
    break_at(stage, everyone[victim], calls)
    said, failed = run(scheduler_of(target), everyone, rng)
    words = [words for _, words in alone]
    assert [type(each) for each in failed] == [
        RuntimeError if i == victim else type(None) for i in range(COUNT)
    ]
    assert said[:victim] + said[victim + 1 :] == words[:victim] + words[victim + 1 :]
    assert said[victim] == words[victim][: len(said[victim])]


def test_a_pass_that_breaks_off_leaves_recurrent_states_as_they_were():
    target, config = Target(make_model("qwen3_5"), 1000, "qwen3_5"), config_of(1)
    prompts = [prompt_of(i, 5 + 11 * i) for i in range(3)]
    words = [answer(target, NoDraft(), prompt, config) for prompt in prompts]
    everyone = [
        running(target, 1, prompt, foretold(prompt, said, i))
        for i, (prompt, said) in enumerate(zip(prompts, words, strict=True))
    ]
    break_at("layer", everyone[0], 4)  # behind one that is recurrent
    said, failed = run(scheduler_of(target), everyone, Eager())
    assert said[1:] == words[1:] and [each is None for each in failed] == [False, True, True]


@pytest.mark.parametrize("term", ["draft", "verify", "commit"])
def test_one_that_is_cancelled_inside_a_step_leaves_the_others_as_they_were(target, alone, term):
    everyone, when = sequences(target, alone), 5
    gone, others = everyone[3], [0, 1, 2, 4, 5]

    class Cancels(Strict):
        def mark(self, said: str) -> None:
            nonlocal when
            when -= said == term
            if when == 0 and said == term:
                engine.cancel(gone)

    engine = scheduler_of(target, observer=Cancels(), prefixes=PrefixCache(1 << 30))
    said, failed = run(engine, everyone, Eager())
    again = running(target, 3, alone[3][0], NoDraft())
    assert run(engine, [again], Eager())[0] == [alone[3][1]] and again.statistics.reused_tokens
    assert [said[i] for i in others] == [alone[i][1] for i in others] and not any(failed)
    assert said[3] == alone[3][1][: len(said[3])] and len(said[3]) < len(alone[3][1])


def company(target, length):
    """A scheduler in which one decodes, and one that has `length` tokens to read has come."""
    engine = scheduler_of(target, observer=Strict())
    first = running(target, 5, prompt_of(1, 5), NoDraft())
    second = running(target, 0, prompt_of(0, length), NoDraft())
    second.config = replace(second.config, prefill_step=512)
    engine.add(first)
    engine.step()
    engine.add(second)
    return engine, first, second


def test_a_long_prompt_rides_along_in_chunks_that_the_others_bear(target, monkeypatch):
    seconds = tuple(
        10.0 + n for n in (1, 64, 512)
    )  # so 8 more rows take a row up to 1.75 times its time
    monkeypatch.setattr(target, "pass_times", PassTimes((1, 64, 512), seconds))
    (engine, first, second), positions = company(target, 300), [0]
    while second.is_reading:
        told = dict((id(each), outcome) for each, outcome in engine.step())
        assert told[id(first)] is not None, "which goes on meanwhile"
        positions.append(second.state.position)
        if len(positions) == 9:
            engine.cancel(first)
            engine.step()
            break
    assert set(np.diff(positions)) == {8}, "with which a step takes less than 1.75 times its time"
    assert not second.is_reading, "and nobody has to bear the rest"


def test_chunks_are_shorter_where_a_row_of_the_prompt_takes_longer(target, monkeypatch):
    """A row behind 600 tokens takes three times what one takes behind none."""
    near, far = (10.0, 10.5, 42.0), (10.0, 11.5, 106.0)
    deep = PassTimes((1, 2, 65), far, 600)
    monkeypatch.setattr(target, "pass_times", PassTimes((1, 2, 65), near, 0, (deep,)))
    (engine, _, second), chunks = company(target, 600), []
    while second.is_reading and not chunks[19:]:
        before = second.state.position
        engine.step()
        chunks.append(second.state.position - before)
    assert chunks[0] == 14 and chunks == sorted(chunks, reverse=True) and 8 <= chunks[-1] < 11


def test_answers_with_long_contexts_count_them_whole(target, monkeypatch):
    """A new prompt's rows take nothing from what is read of the others' contexts."""
    deep = PassTimes((1, 101), (40.0, 50.0), 30_000)
    monkeypatch.setattr(target, "pass_times", PassTimes((1, 101), (10.0, 20.0), 0, (deep,)))
    engine = scheduler_of(target)
    old = SimpleNamespace(state=SimpleNamespace(position=30_000))
    assert (
        engine._bearable(target, [old], 0) == 300
    )  # of a pass that takes 40.0 alone, and 0.1 a row


# Random lives of an engine: every answer is the one that its request would get alone.


# scripts/schedules.py runs 64, and some on the default pair.
SCHEDULES = 8


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return {name: toy_pair(name, tmp_path_factory.mktemp(name)) for name in TOYS}


@pytest.fixture(scope="module")
def ended(pairs):
    """What went wrong, and what became of all requests."""
    found, everyone = [], []
    for seed in range(SCHEDULES):
        wrong, ended = problems(pairs[TOYS[seed % len(TOYS)]], schedule_of(seed, prompts, 24))
        found += wrong
        everyone += ended
    return found, everyone


def test_every_answer_is_the_one_of_its_request_alone(ended):
    found, everyone = ended
    assert not found
    assert sum(len(each.said) for each in everyone) > 300


def test_requests_left_and_caches_were_dropped(ended):
    _, everyone = ended
    assert any(each.left and each.said for each in everyone)
    assert any(each.drops and each.said for each in everyone)
    assert any(each.statistics.reused_tokens for each in everyone)


def test_only_near_ties_excuse_a_difference(pairs):
    target, prompt = pairs["llama"].target, [5, 6, 7]
    greedy = Request(prompt, DecodeConfig(), 0, None, False)
    sampling = SamplingConfig(0.7, 0.9, seed=3)
    hot = Request(prompt, DecodeConfig(sampling=sampling), 0, None, False)
    for request in (greedy, hot):
        margins = [margin(target, request, [], (4, token)) for token in range(97) if token != 4]
        assert min(margins) >= 0 and max(margins) > 0.01
        unlike = int(np.argmax([margin(target, request, [], (4, token)) for token in range(97)]))
        assert not excused(target, request, [4, 9], [unlike, 9])
        assert excused(target, request, [4, 9], [4, 9, 1]) is False, "one is longer"
    assert margin(target, greedy, [], (4, 4)) == 0
    said = answer(target, NoDraft(), prompt, replace(hot.config, max_tokens=20))
    for at, token in enumerate(said):
        assert margin(target, hot, said[:at], (token, token)) < 0, "it is what MLX drew"
