"""What was read once is not read again: turns, branches, several at once; answers stay the same."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import CacheKey
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.cache import STEP
from dflash_mlx.verifier.model import Target
from support.decoding import (
    Strict,
    finish,
    go_on,
    said_by,
    scheduler_of,
    sequence_of,
    start,
    tokens_in,
)
from support.decoding import run as answer_of
from support.families import make_model
from support.hybrids import plain_answer, target_of
from support.pairs import full_pair
from support.toys import Letters, prompt_of

TARGETS = ["llama", "llama_sliding", "falcon_h1"]
METHODS = {
    "none": {},
    "ngram": {},
    "dflash": {},
    "ddtree": {"budget": 12},
    "d2sd": {"budget": 12},
    "eagle3": {"budget": 12},
    "mtp": {"budget": 12},
    "lm": {"budget": 12},
    "specdiff": {"budget": 12},
}
PLENTY = 10**9  # bytes
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(scope="module", params=TARGETS)
def pair(request, tmp_path_factory):
    target = Target(make_model(request.param), 4096, request.param)
    return full_pair(tmp_path_factory.mktemp("pair"), target, Letters())


def config_of(method: str, **more) -> DecodeConfig:
    return DecodeConfig(method, **{"max_tokens": 12, **METHODS[method], **more})


@pytest.mark.parametrize("method", METHODS)
def test_a_second_turn_reads_nothing_again_and_says_what_it_would_from_the_beginning(pair, method):
    prefixes, prompt = PrefixCache(PLENTY), prompt_of(0, 600)
    first, reused = said_by(Session(pair, config_of(method), prefixes), prompt)
    assert reused == 0
    said_by(Session(pair, config_of(method), prefixes), prompt_of(1, 50))  # another conversation
    before = [*prompt, *first]
    follow_up = [*before, *prompt_of(2, 20)]
    again, reused = said_by(Session(pair, config_of(method), prefixes), follow_up)
    assert again == plain_answer(pair.target, follow_up, 12)
    assert reused >= 0.95 * len(before)


@pytest.mark.parametrize("name", TARGETS)
def test_a_prompt_that_parts_in_the_middle_of_another_is_read_from_near_there(name):
    target, prefixes, shared = target_of(name), PrefixCache(PLENTY), prompt_of(3, 1500)
    long = [*shared, *prompt_of(4, 500)]  # whose last chunk begins before them
    prefixes.put(start(target, NoDraft(), long), target, NoDraft())
    other = [*shared, *prompt_of(5, 30)]
    state = prefixes.take(other, target, NoDraft())
    reused = go_on(target, NoDraft(), state, other)
    assert answer_of(target, NoDraft(), state, DecodeConfig(max_tokens=8)) == plain_answer(
        target, other, 8
    )
    assert reused == (1024 if target.is_recurrent else 1500)


def test_of_a_long_prompt_a_few_states_are_kept_all_over_it():
    target, rng = target_of("falcon_h1"), np.random.default_rng(0)
    state = start(target, NoDraft(), prompt_of(6, 3000), DecodeConfig(prefill_step=200))
    starts = [chunk.start for chunk in state.cache.parts[0]._chunks]
    assert len(starts) == 4 and max(np.diff([0, *starts])) <= 1200
    for length in rng.integers(starts[0], 3000, 5).tolist():
        assert state.nearest(length) >= max(s for s in starts if s <= length)


def test_what_windows_have_passed_is_kept_where_nothing_else_leads_back():
    """The first turn's end can be gone back to, though the second turn begins with it."""
    target, prefixes = target_of("llama_sliding"), PrefixCache(PLENTY)
    first, other = prompt_of(7, 300), prompt_of(8, 5)
    prefixes.put(start(target, NoDraft(), first), target, NoDraft())
    second = start(target, NoDraft(), [*first, *prompt_of(9, 300)])
    prefixes.put(second, target, NoDraft())
    state = prefixes.take([*first, *other], target, NoDraft())
    assert state.reuse(Prompt.of([*first, *other])) == 300
    whole = target_of("llama")
    prefixes = PrefixCache(PLENTY)
    for prompt in (first, second.tokens):
        prefixes.put(start(whole, NoDraft(), prompt), whole, NoDraft())
    assert prefixes.nbytes == start(whole, NoDraft(), second.tokens).nbytes, "one covers both"


def test_a_state_is_for_its_own_target_and_its_own_drafter_alone(tmp_path):
    target, prompt = Target(make_model("llama"), 4096, "llama"), prompt_of(10, 40)
    pair = full_pair(tmp_path, target, Letters())
    prefixes = PrefixCache(PLENTY)

    def reused(pair: Pair, method: str) -> int:
        deltas = Session(pair, config_of(method), prefixes).stream(prompt)
        return next(deltas).statistics.reused_tokens

    said_by(Session(pair, config_of("dflash"), prefixes), prompt)
    expected = {"dflash": 39, "ddtree": 39, "d2sd": 0, "eagle3": 0, "mtp": 0, "lm": 0, "none": 0}
    assert {method: reused(pair, method) for method in expected} == expected
    drafter = make_drafter(pair, config_of("dflash"))
    target.kv_bits = 8
    assert not prefixes.take(prompt, target, drafter).position
    target.kv_bits = None
    other = full_pair(tmp_path / "other", Target(make_model("llama"), 4096, "llama"), Letters())
    assert reused(other, "dflash") == 0


def put(prefixes: PrefixCache, target: Target, seed: int, length: int = 40) -> list[int]:
    prompt = prompt_of(seed, length)
    prefixes.put(start(target, NoDraft(), prompt), target, NoDraft())
    return prompt


def test_what_was_used_least_recently_goes_first_and_the_limit_is_kept():
    target = target_of("llama")
    one = start(target, NoDraft(), prompt_of(0, 40)).nbytes
    prefixes = PrefixCache(3 * one)
    first, second, third = (put(prefixes, target, seed) for seed in (11, 12, 13))
    assert prefixes.nbytes == 3 * one
    kept = prefixes.take([*first, 1], target, NoDraft())
    assert kept.match_length(Prompt.of([*first, 1])) == 40
    put(prefixes, target, 14)
    assert prefixes.nbytes == 3 * one
    there = [prefixes.take([*p, 1], target, NoDraft()).position for p in (first, second, third)]
    assert there == [40, 0, 40]


def test_a_conversation_that_would_not_fit_twice_is_continued_in_place():
    target, prefixes = target_of("llama"), PrefixCache(0)
    prompt = put(prefixes, target, 15)
    assert prefixes.nbytes, "the last one stays"
    storage = prefixes._entries[0].state
    assert prefixes.take([*prompt, 1], target, NoDraft()) is storage
    assert prefixes.nbytes == 0
    put(prefixes, target, 16)
    prefixes.take(prompt, target, NoDraft())
    assert prefixes.nbytes == 0, "another has begun"


def test_a_short_prefix_of_a_long_conversation_takes_little_memory():
    target, prefixes = target_of("llama"), PrefixCache(PLENTY)
    prompt = put(prefixes, target, 17, 10 * STEP)
    state = prefixes.take(prompt[:20], target, NoDraft())
    state.reuse(Prompt.of(prompt[:20]))
    assert state.nbytes <= prefixes.nbytes / 10


# The engine


def running(target: Target, prompt: list[int], seed: int, tokens: int = 10) -> Sequence:
    sampling = SamplingConfig(temperature=0.8 if seed % 2 else 0.0, seed=seed)
    config = DecodeConfig(max_tokens=tokens, prefill_step=64, sampling=sampling)
    return sequence_of(target, NoDraft(), prompt, config)


def run(engine: Scheduler, everyone: list[Sequence], look=lambda: None) -> list[list[int]]:
    for each in everyone:
        engine.add(each)
    said = finish(engine, look)
    return [tokens_in(delta.accepted for delta in said[each]) for each in everyone]


def each_alone(target: Target, prompts: list, tokens: int = 10) -> list[list[int]]:
    asked = [running(target, prompt, seed, tokens) for seed, prompt in enumerate(prompts)]
    return [run(scheduler_of(target), [each])[0] for each in asked]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_requests_that_begin_alike_read_their_beginning_once(name, known):
    """One has read it before, or the first of them does while the others wait."""
    target, system = target_of(name), prompt_of(23, 200)
    prompts = [[*system, *prompt_of(24 + i, 10 + i)] for i in range(4)] + [prompt_of(29, 90)]
    engine = scheduler_of(target, observer=Strict(), prefixes=PrefixCache(PLENTY))
    if known:
        run(engine, [running(target, [*system, 5], 0)])
    everyone = [running(target, p, i) for i, p in enumerate(prompts)]
    assert run(engine, everyone) == each_alone(target, prompts)
    first, *others, last = [each.statistics.reused_tokens for each in everyone]
    read, chunks = (168, 0) if name == "falcon_h1" else (200, 192)  # few ways back of states
    assert last == 0
    if known:
        assert min(first, *others) >= read
    else:
        assert (first, others) == (0, [chunks] * 3)


def test_who_waited_for_one_that_is_cancelled_goes_on_from_what_that_had_read():
    target, system = target_of("llama"), prompt_of(23, 200)
    first, second = (running(target, [*system, i], i) for i in range(2))
    _, alone = each_alone(target, [first.prompt, second.prompt])
    engine = scheduler_of(target, observer=Strict(), prefixes=PrefixCache(PLENTY))
    for each in (first, second):
        engine.add(each)
    engine.step()
    assert (first.state.position, second.state.position) == (64, 0)
    engine.cancel(first)
    outcomes = [outcome for _ in range(15) for _, outcome in engine.step()]
    assert [t for each in outcomes if each for t in each.accepted.tokens] == alone
    assert second.statistics.reused_tokens == 64 and not engine.running


def test_who_is_cancelled_leaves_what_was_read_and_who_fails_does_not():
    target, prompt = target_of("llama"), prompt_of(28, 100)
    engine = scheduler_of(target, prefixes=PrefixCache(PLENTY))
    left, broken = running(target, prompt, 0), running(target, prompt_of(29, 100), 0)
    for each in (left, broken):
        engine.add(each)
        engine.step()

    def fails(*_):
        raise RuntimeError("no")

    broken.state.commit_prompt = fails
    outcome = dict(engine.step())[broken]
    assert isinstance(outcome, RuntimeError)
    for each in (left, broken):
        engine.cancel(each)
    again = [running(target, each.prompt, 0) for each in (left, broken)]
    for each in again:
        engine.add(each)
    engine.step()
    assert [each.statistics.reused_tokens for each in again] == [99, 0]


def test_prefixes_give_way_before_any_sequence_has_to():
    target, prompts = target_of("llama"), [prompt_of(30 + i, 100 + 60 * i) for i in range(4)]
    engine = scheduler_of(target, observer=Strict(), prefixes=PrefixCache(PLENTY))
    engine.memory.limit = 2 * engine.memory.bytes_of(target, NoDraft(), 400)
    for seed in range(6):
        run(engine, [running(target, prompt_of(40 + seed, 100), seed)])
    full = engine.prefixes.nbytes
    least = [full]

    def look():
        assert engine.used + engine.prefixes.nbytes <= engine.memory.limit
        least.append(engine.prefixes.nbytes)

    everyone = [running(target, p, i, 60) for i, p in enumerate(prompts)]
    assert run(engine, everyone, look) == each_alone(target, prompts, 60)
    assert min(least) < full


@pytest.mark.parametrize("tokens", [100, 300, 1100])
def test_the_bytes_of_a_sequence_are_known_before_it_is_read(tokens):
    target = target_of("llama")
    state = start(target, NoDraft(), prompt_of(3, tokens))
    assert scheduler_of(target).memory.bytes_of(target, NoDraft(), tokens) == state.nbytes


def test_who_goes_on_takes_what_is_kept_before_that_gives_way_to_him():
    target, prefixes = target_of("llama"), PrefixCache(PLENTY)
    prompt = put(prefixes, target, 15, 3 * STEP)
    again = running(target, [*prompt, *prompt_of(16, STEP)], 0)
    engine = scheduler_of(target, observer=Strict(), prefixes=prefixes)
    engine.memory.limit = engine.memory.bytes_of(target, again.drafter, 5 * STEP)  # not for both
    engine.add(again)
    engine.step()
    assert again.statistics.reused_tokens == len(prompt)


def test_who_begins_like_a_running_one_throws_no_other_out():
    target, prefixes = target_of("llama"), PrefixCache(0)
    kept = put(prefixes, target, 15, STEP)
    engine = scheduler_of(target, observer=Strict(), prefixes=prefixes)
    first = running(target, prompt_of(17, 2 * STEP), 0, 60)
    engine.add(first)
    while first.is_reading:
        engine.step()
    put(prefixes, target, 15, STEP)
    second = running(target, [*first.prompt.tokens[:100], *prompt_of(18, 9)], 0)
    engine.add(second)
    engine.step()
    assert second.statistics.reused_tokens == 100 and prefixes._best(
        CacheKey.of(target, NoDraft(), first.state), Prompt.of([*kept, 1])
    )[1] == len(kept)
