import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.sampling import Sampler, filter_logprobs
from support.law import VOCABULARY, law_distance
from support.toys import Scripted, ToyTarget, random_tree

LOGITS = mx.log(mx.array([0.4, 0.3, 0.2, 0.1]))


def kept(logprobs: mx.array) -> list[int]:
    return [i for i, value in enumerate(logprobs.tolist()) if value > -float("inf")]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"min_p": 0.499999}, [0, 1, 2]),
        ({"min_p": 0.6}, [0, 1]),
        ({"top_p": 0.95, "top_k": 2}, [0, 1]),
    ],
)
def test_filters_keep_the_tokens_their_definitions_name(settings, tokens):
    assert kept(filter_logprobs(LOGITS, SamplingConfig(temperature=1.0, **settings))) == tokens


def test_filtering_works_on_probabilities_whatever_constant_the_logits_carry():
    config = SamplingConfig(temperature=1.0, top_p=0.7)
    shifted = filter_logprobs(LOGITS + 50, config)
    assert np.allclose(shifted, filter_logprobs(LOGITS, config), atol=1e-4)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_recent_tokens():
    config = SamplingConfig(repetition_penalty=2.0, repetition_context=2)
    logits = Sampler(config).adjusted(mx.array([4.0, -4.0, 4.0, 4.0]), [0, 1, 2])
    assert logits.tolist() == [4.0, -8.0, 2.0, 4.0]


def test_a_token_depends_on_seed_and_position_and_nothing_else():
    sampler = Sampler(SamplingConfig(temperature=1.0, seed=3))
    logits = mx.zeros(1000)
    token = sampler.sample(logits, 7, []).item()
    mx.random.seed(99)
    sampler.sample(logits, 8, [])
    assert sampler.sample(logits, 7, [1, 2]).item() == token
    assert sampler.sample(logits, 8, []).item() != token
    other = Sampler(SamplingConfig(temperature=1.0, seed=4))
    assert other.sample(logits, 7, []).item() != token


def test_without_a_seed_every_answer_has_its_own():
    seeds = {Sampler(SamplingConfig(temperature=1.0)).config.seed for _ in range(5)}
    assert len(seeds) == 5


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6, "top_p": 0.8}, {"repetition_penalty": 1.7, "repetition_context": 2}],
    ids=["plain", "filtered", "penalised"],
)
def test_sampled_answers_follow_the_enumerated_law_whatever_was_drafted(settings):
    rng = np.random.default_rng(1)
    drafter = Scripted(lambda tokens, room: random_tree(rng, min(room, 6) - 1, VOCABULARY))
    config = DecodeConfig(sampling=SamplingConfig(**{"temperature": 1.0, **settings}))
    assert law_distance(ToyTarget(VOCABULARY), lambda sampling: drafter, 1000, config) < 4
