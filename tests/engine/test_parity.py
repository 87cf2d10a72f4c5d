"""First differences between answers, and the margins that explain them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.engine.exact import Difference, first_difference
from dflash_mlx.verifier.model import Target
from support.families import make_model

PROMPT = [5, 9, 30, 41, 7]
PLAIN = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model("llama"), 512, "llama")


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_difference_has_its_position_and_the_margin_of_the_logits_there(target, at):
    other = [*PLAIN]
    other[at:] = [60 + i for i in range(4 - at)]
    found = first_difference(target, PROMPT, PLAIN, other)
    logits = np.array(make_model("llama")(mx.array([PROMPT + PLAIN[:at]]))[0, -1])
    margin = abs(logits[PLAIN[at]] - logits[other[at]])
    assert margin > 0.05
    assert found.position == at
    assert found.margin == pytest.approx(margin, abs=1e-4)
    assert first_difference(target, PROMPT, PLAIN, other) == found, "looking changes nothing"
    assert first_difference(target, PROMPT, PLAIN, list(PLAIN)) is None


@pytest.mark.parametrize("other", [PLAIN[:2], [], [*PLAIN, 14]], ids=["shorter", "none", "longer"])
def test_an_answer_of_another_length_differs_where_the_shorter_one_ends(target, other):
    expected = Difference(min(4, len(other)), None)
    assert first_difference(target, PROMPT, PLAIN, other) == expected
    assert first_difference(target, PROMPT, other, PLAIN) == expected
    assert not expected.is_near_tie
