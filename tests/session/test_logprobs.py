"""Log-probabilities of tokens: the target's own law, whatever was drafted and drawn."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.toys import Letters, prompt_of

PROMPT = prompt_of(3, 9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = Target(make_model("llama"), 64, "llama")
    model = drafter_folder(tmp_path_factory.mktemp("drafter"), [0, 1, 2], 1, target)
    return Pair(target, Letters(), (model,), "tiny")


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
    deltas = [*Session(pair, config).stream(PROMPT)]
    laws = [law for delta in deltas for law in delta.logprobs]
    tokens = [law.token for law in laws]
    assert tokens == [token for delta in deltas for token in delta.tokens]
    expected = one_by_one(pair.target, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    for law, row in zip(laws, expected, strict=True):
        assert law.logprob == pytest.approx(row[law.token], abs=1e-3)
        best = np.sort(row)[::-1][:3]
        assert [value for _, value in law.top] == pytest.approx(best, abs=1e-3)
        assert all(row[token] == pytest.approx(value, abs=1e-3) for token, value in law.top)


def test_answers_are_the_same_with_and_without_and_carry_nothing_unasked(pair):
    def run(logprobs: int | None):
        config = DecodeConfig("ddtree", max_tokens=20, logprobs=logprobs)
        return [*Session(pair, config).stream(PROMPT)]

    def tokens(deltas) -> list[int]:
        return [token for delta in deltas for token in delta.tokens]

    with_them, without = run(0), run(None)
    assert tokens(with_them) == tokens(without)
    assert all(delta.logprobs == () for delta in without)
    assert all(len(d.logprobs) == len(d.tokens) for d in with_them)
