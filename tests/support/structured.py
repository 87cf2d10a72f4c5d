"""Questions that are answered under a schema, many at a time, and what tells valid answers."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

from dflash_mlx import DecodeConfig, Pair, SamplingConfig, StructureConfig, prompt_tokens
from dflash_mlx.engine.delta import Delta, collect
from dflash_mlx.session.scheduler import Scheduler

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value follows a schema of the keywords below."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(conforms(value, each) for each in schema["anyOf"])
    kind = schema["type"]
    if kind in ("integer", "number"):
        numbers = (int,) if kind == "integer" else (int, float)
        right = isinstance(value, numbers) and not isinstance(value, bool)
        return right and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if not isinstance(value, _TYPES[kind]):
        return False
    if kind == "string":
        fits = re.search(schema.get("pattern", ""), value) is not None  # anywhere, as JSON Schema
        return fits and len(value) <= schema.get("maxLength", len(value))
    if kind == "array":
        count = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return count and all(conforms(item, schema["items"]) for item in value)
    if kind == "object":
        known = schema["properties"]
        whole = {*schema["required"]} <= {*value} <= {*known}
        return whole and all(conforms(item, known[name]) for name, item in value.items())
    return True


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(items: dict[str, Any], most: int, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(**properties: Any) -> dict[str, Any]:
    known = {"type": "object", "properties": properties, "required": [*properties]}
    return {**known, "additionalProperties": False}


ASKED: list[tuple[str, dict[str, Any]]] = [
    (
        "Describe a person as JSON: name, age, email, hobbies.",
        _object(
            name=_text(30),
            age=_number(0, 120),
            email={"type": "string", "pattern": r"^[a-z]{1,12}@[a-z]{1,12}\.(com|org)$"},
            hobbies=_list(_text(20), 3),
        ),
    ),
    (
        "Rate this film review as JSON: 'A slow start, but what an ending!'",
        _object(
            sentiment={"enum": ["positive", "negative", "mixed"]},
            score=_number(1, 10),
            reasons=_list(_text(60), 3),
            recommended={"type": "boolean"},
        ),
    ),
    (
        "Extract the order as JSON: two pizzas and a cola to 5 Main Street, today at 19:30.",
        _object(
            items=_list(
                _object(name=_text(20), count=_number(1, 20), size={"enum": ["S", "M", "L"]}), 3
            ),
            address=_text(40),
            time={"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
            note={"anyOf": [_text(20), {"type": "null"}]},
        ),
    ),
    (
        "Call a tool to learn the weather in Paris tomorrow.",
        _object(
            name={"enum": ["get_weather"]},
            arguments=_object(
                city=_text(30), day={"enum": ["today", "tomorrow"]}, unit={"enum": ["C", "F"]}
            ),
        ),
    ),
    (
        "List three rivers as JSON, with their countries and lengths in km.",
        _object(
            rivers=_list(
                _object(name=_text(20), country=_text(20), length_km=_number(1, 9999)), 3, 3
            )
        ),
    ),
]


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
