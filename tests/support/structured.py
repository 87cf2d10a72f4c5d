"""Questions that are answered under a schema, many at a time."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from dflash_mlx import DecodeConfig, Pair, SamplingConfig, StructureConfig, prompt_tokens
from dflash_mlx.engine.delta import Delta, collect
from dflash_mlx.session.scheduler import Scheduler
from support.schemas import ASKED, conforms


def asked(
    pair: Pair, i: int, method: str = "auto", temperature: float = 1.0
) -> tuple[list[int], DecodeConfig, Any]:
    """The tokens and settings of a question, its schema, by number."""
    question, schema = ASKED[i % len(ASKED)]
    sampling = SamplingConfig(temperature, seed=i)
    structure = StructureConfig(json_schema=json.dumps(schema))
    config = DecodeConfig(method, max_tokens=400, sampling=sampling, structure=structure)
    return prompt_tokens(pair.tokenizer, question), config, schema


def valid_answers(pair: Pair, number: int) -> tuple[int, int]:
    """Of so many answers at temperature 1, eight at a time: how many are valid, and drafts kept."""
    waiting, kept = deque(range(number)), 0
    running: dict[Any, tuple[Any, list[Delta]]] = {}
    scheduler = Scheduler(pair)
    while waiting or scheduler:
        while waiting and len(scheduler) < 8:
            tokens, config, schema = asked(pair, waiting.popleft())
            running[scheduler.submit(tokens, config)] = schema, []
        for answering, delta in scheduler.step():
            assert not isinstance(delta, Exception), delta
            running[answering][1].append(delta)
            kept += len(delta.accepted.path) - 1
    answers = [(schema, collect(iter(deltas))) for schema, deltas in running.values()]
    valid = [a.finish_reason == "stop" and conforms(json.loads(a.text), s) for s, a in answers]
    return sum(valid), kept
