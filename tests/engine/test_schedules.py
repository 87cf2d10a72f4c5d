"""Whatever happens to an engine, every answer is the one that its request would get alone."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from support.schedules import TOYS, Request, excused, margin, problems, schedule_of, toy_pair
from support.schedules import toy_prompt as prompts

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
