"""The default pair is weak; under a schema its answers are valid all the same, with drafts."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import pytest

from dflash_mlx import (
    DecodeConfig,
    SamplingConfig,
    StructureConfig,
    first_difference,
    load,
    prompt_tokens,
)
from dflash_mlx.session.answer import collect
from dflash_mlx.session.many import Conversations
from dflash_mlx.session.stream import Session
from support.schemas import ASKED, conforms


@pytest.fixture(scope="module")
def pair():
    return load()


def asked(pair, i, method="auto", temperature=1.0):
    """The tokens and settings of a question, its schema, by number."""
    question, schema = ASKED[i % len(ASKED)]
    sampling = SamplingConfig(temperature, seed=i)
    structure = StructureConfig(json_schema=json.dumps(schema))
    config = DecodeConfig(method, max_tokens=400, sampling=sampling, structure=structure)
    return prompt_tokens(pair.tokenizer, question), config, schema


@pytest.mark.real
def test_a_hundred_answers_of_a_hundred_follow_their_schemas_at_temperature_1(pair):
    """Eight at a time, with drafts."""
    waiting, running, valid, kept = deque(range(100)), {}, 0, 0
    conversations = Conversations(pair)
    while waiting or conversations:
        while waiting and len(conversations) < 8:
            tokens, config, schema = asked(pair, waiting.popleft())
            running[conversations.begin(tokens, config)] = schema, []
        for answering, delta in conversations.step():
            assert not isinstance(delta, Exception), delta
            running[answering][1].append(delta)
            kept += len(delta.accepted.path) - 1
    for schema, deltas in running.values():
        answer = collect(iter(deltas))
        assert answer.finish_reason == "stop"
        valid += conforms(json.loads(answer.text), schema)
    assert valid == 100
    assert kept > 100, "drafts were accepted"


@pytest.mark.real
def test_greedy_answers_are_the_plain_ones_up_to_near_ties_in_fewer_rounds(pair):
    for i in range(len(ASKED)):
        tokens, config, _ = asked(pair, i, "none", 0.0)
        plain = collect(Session(pair, config).stream(tokens))
        drafted = collect(Session(pair, replace(config, method="auto")).stream(tokens))
        difference = first_difference(pair.target, tokens, plain.tokens, drafted.tokens)
        assert difference is None or difference.is_near_tie
        assert drafted.statistics.rounds < plain.statistics.rounds
