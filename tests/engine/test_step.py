"""Several sequences in one pass decode what each decodes alone, whatever the others do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.step import step
from dflash_mlx.verifier.model import Target
from support.decoding import Strict, answer, sequence_of
from support.families import make_model
from support.toys import foretold, prompt_of

FAMILIES = ("llama", "gemma3_text", "qwen3_5", "gemma2")  # the last takes turns


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return Target(make_model(request.param), 1000, request.param)


def config_of(i: int) -> DecodeConfig:
    heat = 0.8 if i % 3 == 2 else 0.0
    return DecodeConfig(max_tokens=8 + 3 * i, sampling=SamplingConfig(temperature=heat, seed=i))


def begin(target, drafter, prompt, config, chunk):
    return sequence_of(target, drafter, prompt, replace(config, prefill_step=chunk))


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_each_alone(target, seed):
    rng = np.random.default_rng(seed)
    prompts = [prompt_of(i, int(rng.integers(3, 40))) for i in range(5)]
    alone = [answer(target, NoDraft(), p, config_of(i)) for i, p in enumerate(prompts)]
    drafters = [
        foretold(p, a, i) if i % 2 else NoDraft()
        for i, (p, a) in enumerate(zip(prompts, alone, strict=True))
    ]
    waiting = [
        begin(target, drafter, prompt, config_of(i), int(rng.integers(4, 20)))
        for i, (drafter, prompt) in enumerate(zip(drafters, prompts, strict=True))
    ]
    said, running, widest = {id(each): [] for each in waiting}, [], 0
    everyone = list(waiting)
    while waiting or running:
        if waiting and (not running or rng.random() < 0.4):
            running.append(waiting.pop(0))
        widest = max(widest, len(running))
        for each, round_ in zip(running, step(target, running, Strict()), strict=True):
            said[id(each)] += [] if round_ is None else round_.accepted.tokens
        running = [each for each in running if not each.state.has_begun or each.state.remaining > 0]
    assert [said[id(each)] for each in everyone] == alone
    assert widest > 2
