"""Other publishers' heads: many sequences together, kept prefixes, memory that is short."""

from __future__ import annotations

import pytest

from dflash_mlx.engine.pair import Pair
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support import schedules
from support.drafter_formats import written
from support.families import make_model
from support.published_heads import FORMATS

WAYS = (
    {"method": "none"},
    {"method": "mtp"},
    {"method": "mtp", "budget": 9, "branches": 3},
    {"method": "mtp", "block_size": 2},
    {"method": "mtp", "block_size": 2, "acceptance": "reject"},
)
SEEDS = (0, 1)
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(params=["deepseek", "nemotron"])
def pair(request, tmp_path):
    raw, tensors = FORMATS[request.param]
    target = Target(make_model("llama", **raw), 1000, request.param)
    target.pass_times = PassTimes((1, 96), (1.0, 3.0))
    return Pair(target, None, (written(tmp_path, raw, tensors, target),), "tiny")


def test_every_answer_is_the_one_of_its_request_alone(pair, monkeypatch):
    monkeypatch.setattr(schedules, "METHODS", WAYS)
    drafted = reused = 0
    for seed in SEEDS:
        schedule = schedules.schedule_of(seed, schedules.toy_prompt, 24)
        wrong, ended = schedules.problems(pair, schedule)
        assert not wrong
        drafted += sum(each.statistics.drafted.total() for each in ended)
        reused += sum(each.statistics.reused_tokens for each in ended)
    assert drafted > 20
    assert reused
