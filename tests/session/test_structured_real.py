"""The default pair is weak; under a schema its answers are valid all the same, with drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_mlx.client import first_difference, load
from dflash_mlx.engine.delta import collect
from dflash_mlx.session.session import Session
from support.structured import ASKED, asked, valid_answers


@pytest.fixture(scope="module")
def pair():
    return load()


@pytest.mark.real
def test_every_answer_follows_its_schema_at_temperature_1(pair):
    """`scripts/structured_answers.py` asks for a hundred."""
    valid, kept = valid_answers(pair, len(ASKED))
    assert valid == len(ASKED)
    assert kept > len(ASKED), "drafts were accepted"


@pytest.mark.real
def test_a_greedy_answer_is_the_plain_one_up_to_near_ties_in_fewer_rounds(pair):
    tokens, config, _ = asked(pair, 0, "none", 0.0)
    plain = collect(Session(pair, config).stream(tokens))
    drafted = collect(Session(pair, replace(config, method="auto")).stream(tokens))
    difference = first_difference(pair.target, tokens, plain.tokens, drafted.tokens)
    assert difference is None or difference.is_near_tie
    assert drafted.statistics.rounds < plain.statistics.rounds
