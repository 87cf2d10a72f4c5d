"""The loop on tiny real models: equality with plain decoding, limits, abandoning, turns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.statistics import RoundTimer
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.model import Target
from support.decoding import answer, go_on, run, start, tokens_in
from support.decoding import rounds as decode
from support.families import VOCAB_SIZE, make_model
from support.toys import Letters, Scripted, ToyTarget, foretold, prompt_of, random_tree

FAMILIES = ["llama", "llama_sliding", "gemma3_text", "gpt_oss", "qwen3_moe"]


@pytest.fixture(scope="module")
def targets():
    return {name: Target(make_model(name), 1000, name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_equal_plain_decoding_for_drafts_right_and_wrong(targets, name):
    target, prompt = targets[name], prompt_of(1)
    config = DecodeConfig(max_tokens=40, prefill_step=7)
    plain = answer(target, NoDraft(), prompt, config)
    for seed in range(3):
        assert answer(target, foretold(prompt, plain, seed, 20), prompt, config) == plain
    assert len(plain) == 40


def test_right_drafts_save_rounds_and_an_observer_sees_every_term(targets):
    target, prompt = targets["llama"], prompt_of(1)
    config = DecodeConfig(max_tokens=40)
    plain = answer(target, NoDraft(), prompt, config)
    drafter = Scripted(
        lambda tokens, remaining: chain(plain[len(tokens) - 20 :][: min(remaining - 1, 7)])
    )
    state = start(target, drafter, prompt, config)
    timer = RoundTimer()
    rounds = list(decode(target, drafter, state, config, timer))
    assert {"draft", "verify", "commit"} <= set(timer.seconds)
    assert [len(r.tokens) for r in rounds] == [1, 8, 8, 8, 8, 7]
    assert tokens_in(rounds) == plain


def chain(tokens):
    return list(tokens), list(range(len(tokens)))


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"repetition_penalty": 1.5}, {"top_k": 5}])
def test_sampled_answers_equal_plain_decoding_with_the_same_seed(targets, settings):
    target, prompt = targets["llama"], prompt_of(2)
    sampling = SamplingConfig(temperature=0.8, seed=11, **settings)
    config = DecodeConfig(max_tokens=30, sampling=sampling)
    plain = answer(target, NoDraft(), prompt, config)
    assert answer(target, foretold(prompt, plain), prompt, config) == plain
    other = DecodeConfig(max_tokens=30, sampling=SamplingConfig(temperature=0.8, seed=12))
    assert answer(target, NoDraft(), prompt, other) != plain


@pytest.mark.parametrize(
    ("name", "length", "change", "reused"),
    [
        ("llama", 20, lambda prompt, said: prompt + said + prompt_of(6, 8), 29),
        ("llama_sliding", 20, lambda prompt, said: prompt + said + prompt_of(6, 8), 29),
        ("llama", 20, lambda prompt, said: [*prompt[:12], VOCAB_SIZE - 1, *prompt[13:]], 12),
        ("llama", 20, lambda prompt, said: prompt, 19),
        ("llama_sliding", 600, lambda prompt, said: prompt[:60], 0),
    ],
    ids=["a turn more", "and a window", "edited", "again", "too far back for the window"],
)
def test_another_prompt_computes_only_what_is_new(targets, name, length, change, reused):
    target, prompt = targets[name], prompt_of(5, length)
    config = DecodeConfig(max_tokens=10, prefill_step=100)
    state = start(target, NoDraft(), prompt, config)
    other = change(prompt, run(target, NoDraft(), state, config))
    assert go_on(target, NoDraft(), state, other, config) == reused
    assert run(target, NoDraft(), state, config) == answer(target, NoDraft(), other, config)


@given(max_tokens=st.integers(1, 30), nodes=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_the_number_of_tokens_is_exact_however_wide_the_trees_are(max_tokens, nodes, seed):
    target, rng = ToyTarget(5), np.random.default_rng(seed)
    drafter = Scripted(lambda tokens, remaining: random_tree(rng, min(nodes, remaining) - 1, 5))
    assert len(answer(target, drafter, [0, 1], DecodeConfig(max_tokens=max_tokens))) == max_tokens


@pytest.mark.parametrize(
    "drafter", [NoDraft(), Scripted(lambda t, remaining: chain([1] * (remaining - 1)))]
)
@pytest.mark.parametrize(("length", "most"), [(20, 1000), (31, 1000), (30, 2), (20, 1), (1, 5)])
def test_the_context_is_filled_and_never_overrun(drafter, length, most):
    target, prompt = ToyTarget(3, context_length=32), [0] * length
    config = DecodeConfig(max_tokens=most)
    state = start(target, drafter, prompt, config)
    said = run(target, drafter, state, config)
    assert state.tokens == [*prompt, *said][:-1], "the last token is in no cache"
    assert len(said) == min(32 - length, most)
    assert said == answer(target, Scripted(lambda t, remaining: ([], [])), prompt, config)


def test_an_observer_hears_how_far_a_prompt_is_and_no_term_of_a_round_has_its_time(targets):
    class Progress(RoundTimer):
        seen: list[tuple[int, int]] = []

        def prefilled(self, tokens: int, total: int) -> None:
            assert not self.seconds
            self.seen.append((tokens, total))

    observer, config = Progress(), DecodeConfig("none", max_tokens=3, prefill_step=8)
    list(Session(Pair(targets["llama"], Letters()), config).stream(prompt_of(1), observer))
    assert observer.seen == [(0, 20), (8, 20), (16, 20), (20, 20)]
    assert observer.seconds["verify"] > 0
