import itertools

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.config import DecodeConfig, SamplingConfig
from dflash_mlx.decode import decode, prefill
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.observer import Observer
from dflash_mlx.sampling import Sampler, filter_logprobs, penalise
from dflash_mlx.state import State
from dflash_mlx.tree import Tree
from toys import Scripted, ToyTarget, random_tree

LOGITS = mx.log(mx.array([0.4, 0.3, 0.2, 0.1]))
PROMPT, LENGTH, VOCABULARY, DRAWS = [0, 1, 2], 3, 4, 3000


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
        ({"min_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.6}, [0, 1]),
        ({"top_p": 0.95, "top_k": 2}, [0, 1]),
    ],
)
def test_filters_keep_the_tokens_their_definitions_name(settings, tokens):
    settings = {k: v - 1e-6 if k == "min_p" and v == 0.5 else v for k, v in settings.items()}
    assert kept(filter_logprobs(LOGITS, SamplingConfig(temperature=1.0, **settings))) == tokens


def test_filtering_works_on_probabilities_whatever_constant_the_logits_carry():
    config = SamplingConfig(temperature=1.0, top_p=0.7)
    shifted = filter_logprobs(LOGITS + 50, config)
    assert np.allclose(shifted, filter_logprobs(LOGITS, config), atol=1e-4)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_recent_tokens():
    config = SamplingConfig(repetition_penalty=2.0, repetition_context=2)
    logits = penalise(mx.array([4.0, -4.0, 4.0, 4.0]), [0, 1, 2], config)
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


def conditional(target: ToyTarget, before: list[int], config: SamplingConfig) -> np.ndarray:
    """The law of the next token in NumPy: filter, then temperature, then normalise."""
    logits = target.table[before[-2], before[-1]].astype(float)
    if config.repetition_penalty != 1:
        for token in set(before[-config.repetition_context :]):
            factor = config.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    p = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-p)
    keep = np.zeros(len(p), dtype=bool)
    keep[order[: np.searchsorted(np.cumsum(p[order]), config.top_p) + 1]] = True
    weights = np.where(keep, p ** (1 / config.temperature), 0)
    return weights / weights.sum()


def enumerated_law(target: ToyTarget, config: SamplingConfig) -> dict[tuple[int, ...], float]:
    law = {}
    for answer in itertools.product(range(VOCABULARY), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(answer):
            chance *= conditional(target, [*PROMPT, *answer[:i]], config)[token]
        law[answer] = chance
    return law


def answer(target: ToyTarget, drafter, config: DecodeConfig) -> tuple[int, ...]:
    state = State(target.new_cache(), drafter.new_context())
    prefill(target, drafter, state, PROMPT, config, Observer())
    rounds = decode(target, drafter, state, config, Observer())
    return tuple(token for accepted in rounds for token in accepted.tokens)


def chi_square(law: dict[tuple[int, ...], float], answers: list[tuple[int, ...]]) -> float:
    """How many standard deviations chi-square is above its mean (Wilson-Hilferty)."""
    cells = {a: chance for a, chance in law.items() if chance * len(answers) >= 5}
    expected = np.array([*cells.values(), 1 - sum(cells.values())]) * len(answers)
    observed = np.array([answers.count(a) for a in cells], dtype=float)
    observed = np.append(observed, len(answers) - observed.sum())
    if expected[-1] < 1e-9:
        assert observed[-1] == 0
        expected, observed = expected[:-1], observed[:-1]
    degrees = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6, "top_p": 0.8}, {"repetition_penalty": 1.7, "repetition_context": 2}],
    ids=["plain", "filtered", "penalised"],
)
def test_sampled_answers_follow_the_enumerated_law_whatever_was_drafted(settings):
    target = ToyTarget(VOCABULARY)
    rng = np.random.default_rng(1)
    drafter = Scripted(lambda tokens, room: random_tree(rng, min(room, 6) - 1, VOCABULARY))
    sampling = {"temperature": 1.0, **settings}
    law = enumerated_law(target, SamplingConfig(**sampling))
    answers = [
        answer(
            target,
            drafter,
            DecodeConfig(max_tokens=LENGTH, sampling=SamplingConfig(seed=i, **sampling)),
        )
        for i in range(DRAWS)
    ]
    assert chi_square(law, answers) < 4


def test_the_law_test_notices_a_rule_that_favours_drafts(monkeypatch):
    target = ToyTarget(VOCABULARY)
    monkeypatch.setattr(Tree, "child", favour_the_draft)
    drafter = Scripted(lambda tokens, room: ([1], [0]) if room > 1 else ([], []))
    law = enumerated_law(target, SamplingConfig(temperature=1.0))
    answers = [
        answer(
            target,
            drafter,
            DecodeConfig(max_tokens=LENGTH, sampling=SamplingConfig(temperature=1.0, seed=i)),
        )
        for i in range(600)
    ]
    assert chi_square(law, answers) > 4


def favour_the_draft(tree: Tree, node: int, token: int) -> int | None:
    """Accept a drafted 1 for a chosen 2 as well."""
    return 1 if node == 0 and token in (1, 2) else None


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"repetition_penalty": 1.3}])
def test_one_seed_gives_one_answer_with_and_without_drafts(settings):
    target = ToyTarget(VOCABULARY)
    rng = np.random.default_rng(2)
    drafter = Scripted(lambda tokens, room: random_tree(rng, min(room, 8) - 1, VOCABULARY))
    for seed in range(20):
        sampling = SamplingConfig(temperature=0.9, seed=seed, **settings)
        config = DecodeConfig(max_tokens=12, sampling=sampling)
        assert answer(target, drafter, config) == answer(target, NoDraft(), config)
