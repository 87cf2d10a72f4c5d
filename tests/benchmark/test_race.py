"""A race on a tiny pair: both ways from one seed, and what came of it."""

from dataclasses import replace

import pytest

from dflash_mlx.benchmark.race import Lane, result_of
from dflash_mlx.client import (
    DecodeConfig,
    DFlashError,
    Difference,
    PairConfig,
    Question,
    RaceResult,
    RaceStep,
    SamplingConfig,
    load_pair,
    race,
)
from support.models import write_drafter, write_model

CONFIG = DecodeConfig(max_tokens=12, method="dflash")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    model, drafter = write_model(root / "model"), write_drafter(root / "drafter")
    return load_pair(PairConfig(str(model), str(drafter)))


def request(**settings):
    return Question(({"role": "user", "content": "hello"},), None, replace(CONFIG, **settings))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.9, seed=1)])
def test_a_race_decodes_both_ways_from_one_seed_and_compares_every_token(pair, sampling):
    *steps, result = race(pair, request(sampling=sampling))
    ends = {step.side: step for step in steps if step.finished}
    length = ends["plain"].tokens
    assert 0 < length == ends["drafted"].tokens
    assert all(isinstance(step, RaceStep) and step.seconds > 0 for step in steps)
    assert isinstance(result, RaceResult) and result.equal
    assert result.text.startswith(f"All {length} tokens are the same. ")
    plain, drafted = ("".join(s.text for s in steps if s.side == side) for side in ends)
    assert plain == drafted
    assert length == 12 or sampling.temperature


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"method": "none"}, "--method"),
        ({"sampling": SamplingConfig(0.9), "acceptance": "reject"}, "--acceptance"),
    ],
)
def test_a_race_in_which_nothing_could_be_compared_is_refused(pair, settings, step):
    with pytest.raises(DFlashError, match=step):
        next(race(pair, request(**settings)))


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        (None, "All 10 tokens are the same. 2.00 times as fast"),
        (Difference(3, 1e-5), "up to token 3, where two tokens are all but tied (logits 1.0e-05"),
        (Difference(3, 0.7), "with logits 0.70 apart, which is no tie: please report it"),
        (Difference(3, None), "one answer ends there"),
    ],
)
def test_a_result_says_what_is_the_same_and_what_is_not(difference, sentence):
    plain = Lane("plain", iter(()), list(range(10)), 2.0, True)
    drafted = Lane("drafted", iter(()), list(range(10)), 1.0, True)
    result = result_of(plain, drafted, difference)
    assert sentence in result.text
    assert result.equal == (difference is None)
