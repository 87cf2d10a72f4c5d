"""The law under bias, penalties and least tokens is plain decoding's, whatever was drafted."""

from __future__ import annotations

from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.drafters.block_diffusion import BestFirst, BlockDiffusion, DrawnBlock
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.verify import Verdict
from dflash_mlx.session.session import Session
from support.decoding import Strict, finish, scheduler_of, sequence_of
from support.law import (
    LENGTH,
    PROMPT,
    VOCABULARY,
    ToyDrafter,
    answers_of,
    chi_square,
    conditional,
    enumerated_law,
)
from support.toys import Letters, Scripted, ToyTarget, random_tree

SETTINGS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "favoured": {"presence_penalty": -0.5, "frequency_penalty": -0.4},
    "bias": {"logit_bias": ((1, 1.5), (2, -2.0))},
    "banned": {"logit_bias": ((0, -100.0), (3, 1.0)), "top_k": 2},
    "least": {"min_tokens": 2, "stop_token_ids": (3,)},
    "none left": {"min_tokens": 2, "stop_token_ids": (0, 1, 2, 3)},
    "all": {
        **{"presence_penalty": 0.6, "frequency_penalty": 0.3, "logit_bias": ((3, 1.0), (0, -1.0))},
        **{"min_tokens": 2, "stop_token_ids": (3, 1), "repetition_penalty": 1.4, "min_p": 0.05},
    },
}
FIRST = ToyDrafter(1)


def trees(sampling):
    rng = np.random.default_rng(sampling.seed)
    return Scripted(lambda tokens, remaining: random_tree(rng, min(6, remaining - 1), VOCABULARY))


MADE = {
    "none": lambda sampling: NoDraft(),
    "chain": lambda sampling: BlockDiffusion(FIRST),
    "tree": lambda sampling: BestFirst(FIRST, None, 6),
    "random trees": trees,
    "reject": lambda sampling: DrawnBlock(FIRST, None, sampling),
}
MATCHED = ("chain", "tree", "random trees")
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def use(temperature, acceptance="match", **settings):
    sampling = SamplingConfig(temperature, **settings)
    return DecodeConfig("dflash", acceptance=acceptance, max_tokens=LENGTH, sampling=sampling)


def distance(name, config, draws):
    """Of answers from the enumerated law, in standard deviations."""
    target = ToyTarget(VOCABULARY)
    law = enumerated_law(target, config.sampling)
    assert sum(law.values()) == pytest.approx(1)
    answers = answers_of(target, MADE[name], draws, config)
    assert set(answers) <= set(law)
    return chi_square(law, answers)


@every_setting
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_law_behind_every_answer_is_the_one_that_its_definition_says(settings, temperature):
    target, config = ToyTarget(VOCABULARY), SamplingConfig(temperature, **settings)
    sampler = Sampler(config, len(PROMPT), config.stop_token_ids)
    for length in range(LENGTH):
        for answer in product(range(VOCABULARY), repeat=length):
            history = [*PROMPT, *answer]
            found = sampler.law(mx.array(target.table[history[-2], history[-1]]), history)
            expected = conditional(target, history, config)
            assert np.allclose(found, expected, atol=1e-5), (answer, found, expected)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_greedy_answer_is_the_likeliest_by_the_same_definition(kind):
    target, (said,) = ToyTarget(VOCABULARY), {*said_plainly(kind, 0.0)}
    for i, token in enumerate(said):
        cold = SamplingConfig(0.01, **SETTINGS[kind])
        assert token == conditional(target, [*PROMPT, *said[:i]], cold).argmax()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_plain_answers_follow_the_law(temperature):
    assert distance("none", use(temperature, **SETTINGS["all"]), 300) < 4


REJECTED = [(1.0, "presence"), (1.0, "bias"), (1.0, "least"), (1.0, "all"), (0.7, "all")]


@pytest.mark.parametrize(("temperature", "kind"), REJECTED)
def test_rejection_follows_the_law(temperature, kind):
    assert distance("reject", use(temperature, "reject", **SETTINGS[kind]), 300) < 4


@cache
def said_plainly(kind, temperature):
    return answers_of(ToyTarget(VOCABULARY), MADE["none"], 40, use(temperature, **SETTINGS[kind]))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", MATCHED)
def test_drafted_answers_are_the_plain_ones_of_their_seeds(name, kind, temperature):
    config = use(temperature, **SETTINGS[kind])
    answers = answers_of(ToyTarget(VOCABULARY), MADE[name], 40, config)
    assert answers == said_plainly(kind, temperature)


def test_every_answer_among_others_is_the_one_alone():
    """All settings, temperatures and shapes of drafts in one engine."""
    target, asked = ToyTarget(VOCABULARY), []
    for seed, (kind, name) in enumerate(product(SETTINGS, MATCHED)):
        config = use((0.0, 0.7, 1.0)[seed % 3], seed=seed % 40, **SETTINGS[kind])
        drafter = MADE[name](config.sampling)
        asked.append((kind, config, sequence_of(target, drafter, PROMPT, config, in_company=True)))
    scheduler = scheduler_of(target, observer=Strict())
    for _, _, sequence in asked:
        scheduler.add(sequence)
    said = finish(scheduler)
    for kind, config, sequence in asked:
        tokens = tuple(token for delta in said[sequence] for token in delta.tokens)
        heat, seed = config.sampling.temperature, config.sampling.seed
        assert tokens == said_plainly(kind, heat)[seed], (kind, heat, seed)


def test_an_answer_that_was_preempted_still_counts_its_own_tokens():
    """Its prompt is then longer than the one that it began with."""
    target, config = ToyTarget(VOCABULARY), use(0.0, frequency_penalty=2.0, logit_bias=((3, 5.0),))
    (plain,) = answers_of(target, MADE["none"], 1, config)
    assert plain.count(3) > 1
    scheduler, said = scheduler_of(target), []
    sequence = sequence_of(target, NoDraft(), PROMPT, config)
    scheduler.add(sequence)
    while len(said) < 2:
        said += [token for _, delta in scheduler.step() for token in delta.tokens]
    scheduler.running.remove(sequence)
    sequence.preempt()
    scheduler.waiting.append(sequence)
    said += [token for delta in finish(scheduler)[sequence] for token in delta.tokens]
    assert tuple(said) == plain


def test_a_token_that_the_model_does_not_have_is_refused_by_the_name_of_its_setting():
    class Sized(Letters):
        def __len__(self) -> int:
            return 14

    pair = Pair(ToyTarget(14), Sized())
    for name, known, wrong in (
        ("stop_token_ids", (13,), (14,)),
        ("logit_bias", ((13, 1.0),), ((14, 1.0),)),
        ("logit_bias", (), ((-1, 1.0),)),
    ):
        settings = [SamplingConfig(**{name: value}) for value in (known, wrong)]
        use = [DecodeConfig("none", max_tokens=1, sampling=each) for each in settings]
        assert len(collect(Session(pair, use[0]).stream([1])).tokens) == 1
        with pytest.raises(DFlashError, match=name):
            collect(Session(pair, use[1]).stream([1]))
    with pytest.raises(DFlashError, match="-100 to 100"):
        SamplingConfig(logit_bias=((1, float("nan")),))


def no_path(self, sampler, state):
    """Every row drawn as if it stood behind the anchor."""
    position, before = state.next_position, list(state.tokens)
    return lambda path: sampler.sample(self.logits[path[-1]], position + len(path) - 1, before)


@pytest.mark.parametrize("kind", ["presence", "frequency", "least", "all"])
def test_a_row_that_forgets_its_path_is_noticed(monkeypatch, kind):
    said_plainly(kind, 1.0)
    monkeypatch.setattr(Verdict, "_sampled", no_path)
    answers = answers_of(ToyTarget(VOCABULARY), MADE["tree"], 40, use(1.0, **SETTINGS[kind]))
    assert answers != said_plainly(kind, 1.0)
