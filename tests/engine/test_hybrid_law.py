"""Sampled answers of a target with recurrent layers follow its law when trees are drafted."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.block_diffusion import BestFirst
from dflash_mlx.verifier import mixers, recurrent
from dflash_mlx.verifier.model import Target
from support.decoding import answer
from support.families import make_model
from support.hybrids import forward
from support.law import VOCABULARY, ToyDrafter, chi_square
from support.recurrent_families import RECURRENT

PROMPT, LENGTH, DRAWS = [0, 3, 2, 1, 3], 3, 400
pytestmark = pytest.mark.usefixtures("interpreted")


def law_of(target, temperature):
    """The chance of every answer, from fresh passes."""
    law = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        logits = forward(target, target.new_cache(), [*PROMPT, *tokens[:-1]])[-LENGTH:]
        p = np.array(mx.softmax(logits / temperature, axis=-1))
        law[tokens] = float(np.prod([p[i, token] for i, token in enumerate(tokens)]))
    return law


def distance(target, temperature):
    """Of answers with drafted trees from the law, in standard deviations."""
    drafter, answers = BestFirst(ToyDrafter(1), None, 8), []
    for seed in range(DRAWS):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        config = DecodeConfig(max_tokens=LENGTH, sampling=sampling)
        answers.append(tuple(answer(target, drafter, PROMPT, config)))
    return chi_square(law_of(target, temperature), answers)


@pytest.fixture
def target(monkeypatch):
    sizes = {"vocab_size": VOCABULARY, "layer_types": ["conv", "conv", "full_attention"]}
    monkeypatch.setitem(RECURRENT, "lfm2", {**RECURRENT["lfm2"], **sizes})
    return Target(make_model("lfm2"), 64, "four tokens")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_answers_follow_the_law(target, temperature):
    assert abs(distance(target, temperature)) < 3.5


def test_mixers_that_follow_no_paths_break_the_law(target, monkeypatch):
    def as_a_chain(layer, paths, call):
        state = recurrent.RecurrentLayer(len(layer.cache), 0)
        state.cache = list(layer.cache)
        return call.changed(lambda arg: state if arg is mixers.STATE else arg)()

    monkeypatch.setattr(recurrent.RecurrentLayer, "along", as_a_chain)
    assert distance(target, 1.0) > 3.5
