"""Batches of answers: alone or in company they are the same, and loops are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DecodeConfig, Pair, Session, load
from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.core.sampling import filter_logprobs
from dflash_mlx.target.model import Target
from dflash_mlx.train.corpus.batch import BatchDecoder, Done, Job, draw, loop_end
from support.families import SLIDING, VOCAB_SIZE, make_model
from support.models import EOS, write_model


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_models_with_sliding_windows_answer_as_they_do_alone(name):
    assert name in SLIDING
    target = Target(make_model(name), 512, name)
    numbers = np.random.default_rng(0)
    prompts = [tuple(numbers.integers(3, VOCAB_SIZE, 5 + 6 * i).tolist()) for i in range(5)]
    together = {done.job.key: done.tokens for done in decode(target, prompts, 5)}
    alone = {done.job.key: done.tokens for done in decode(target, prompts, 1)}
    assert together == alone
    assert len(set(together.values())) == len(prompts)


def test_answers_that_loop_are_cut_where_plain_decoding_began_to_repeat_itself(tmp_path):
    target = Target(make_model("qwen3"), 512, "qwen3")
    prompts = [
        tuple(np.random.default_rng(i).integers(3, VOCAB_SIZE, 9).tolist()) for i in range(6)
    ]
    plain = Session(
        Pair(target, load(str(write_model(tmp_path))).tokenizer),
        DecodeConfig(method="none", max_tokens=150),
    )
    looped = 0
    for done in decode(target, prompts, 4, temperature=0.0, max_tokens=150):
        said = [token for delta in plain.stream(done.job.prompt) for token in delta.tokens]
        ends = [end for i in range(1, 151) if (end := loop_end(said[:i])) is not None]
        assert (done.finish == "loop") == bool(ends)
        assert done.tokens == tuple(said[: ends[0]] if ends else said)
        looped += bool(ends)
    assert 0 < looped < len(prompts), "the tiny model does not show both"


def decode(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    batch_size: int,
    temperature: float = 0.8,
    max_tokens: int = 12,
) -> list[Done]:
    decoder = BatchDecoder(target, batch_size)
    for i, prompt in enumerate(prompts):
        decoder.waiting.append(Job(i, prompt, frozenset([EOS]), max_tokens, temperature, 0.9, i))
    return [done for step in decoder.run() for done in step]


# Draws


@pytest.mark.parametrize(("temperature", "top_p"), [(0.3, 1.0), (1.0, 0.2), (1.7, 0.95)])
def test_draws_follow_the_samplers_law(temperature, top_p):
    logits = mx.random.normal((50,), key=mx.random.key(3)) * 2
    config = SamplingConfig(temperature=temperature, top_p=top_p)
    law = np.array(mx.softmax(filter_logprobs(logits, config) / temperature))
    logprobs = np.array(logits - mx.logsumexp(logits))
    n = 5_000
    drawn = [draw(logprobs, temperature, top_p, (i + 0.5) / n) for i in range(n)]
    assert np.abs(np.bincount(drawn, minlength=50) / n - law).max() < 2 / n * 50


def test_a_draw_may_come_from_far_below_the_likeliest_token():
    logprobs = np.full(500_000, -13.0, np.float32)
    logprobs[7] = 0.0
    logprobs -= np.log(np.exp(logprobs.astype(np.float64)).sum())
    assert draw(logprobs, 1.0, 0.99, 0.2) == 7
    assert draw(logprobs, 1.0, 0.99, 0.999) != 7


# Loops


@pytest.mark.parametrize("period", [1, 8, 9, 32])
def test_a_loop_is_cut_after_its_first_repetition(period):
    cycle = list(range(100, 100 + period))
    before = [1, 2, 3, 4, 5]
    enough = max(3 * period, 24)
    answer = before + (cycle * 40)[:enough]
    assert loop_end(answer[:-1]) is None
    assert answer[: loop_end(answer)] == before + cycle * 2


def test_no_loop_is_seen_where_there_is_none():
    numbers = random.Random(0)
    assert loop_end([]) is None
    assert loop_end([numbers.randrange(3) for _ in range(300)]) is None
    assert loop_end(list(range(33)) * 5) is None, "too long a cycle"
    assert loop_end([5] * 40 + [6]) is None, "it has ended"
