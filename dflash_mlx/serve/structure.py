"""What only a grammar can promise: answers of a JSON schema, tool calls that must come.

The one place where such requests are looked at; what comes of them is a setting of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.grammar import check_structure, left_out
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import constraint_of
from dflash_mlx.serve.chat import Chat, check_text
from dflash_mlx.serve.errors import of_settings, refusal
from dflash_mlx.serve.forms import Form, Json, form_of
from dflash_mlx.serve.grammars import beyond_tags, grammar_of


def structure_of(pair: Pair, chat: Chat) -> StructureConfig | None:
    """The grammar that keeps a request's promise, compiled; takes a moment. None where none asks.

    A call that has to come is preferred to an answer of a schema. ApiError for what cannot be
    promised.
    """
    if not chat.asks:
        return None
    if chat.required is not None and not chat.tools:
        raise refusal("tool_choice", "is given without tools", "leave it out, or send tools")
    if chat.schema is not None:
        loose = _lenient(chat, chat.fields.schema, chat.schema, chat.is_strict)
        chat = replace(chat, schema=loose)
        follows = _checked(chat.fields.schema, pair, schema=loose)
        if not chat.tools:
            return follows
    field = _asking(chat)
    if not (form := form_of(pair)).is_known:
        what = f"needs to know the format of calls, and that of {pair.target.name} is not known"
        raise refusal(field, what, "leave it out, or serve another model")
    grammar = grammar_of(form, chat, _tools(chat, form), pair.tokenizer)
    return _checked(field, pair, grammar=grammar)


def _asking(chat: Chat) -> str:
    """The field because of which calls need a grammar."""
    if chat.required is not None:
        return "tool_choice"
    if chat.schema is not None:
        return chat.fields.form
    strict = [bool(tool["function"].get("strict")) for tool in chat.tools]
    return chat.fields.tool.format(strict.index(True)) + "strict"


def _tools(chat: Chat, form: Form) -> dict[str, Json]:
    """The tools that may be called, each with the schema that its arguments follow."""
    found = {}
    for i, tool in enumerate(each["function"] for each in chat.tools):
        place = chat.fields.tool.format(i)
        check_text(tool["name"], place + "name")
        if chat.required not in (None, "", tool["name"]):
            continue
        schema: Json = {"type": "object"}  # any, where it is not to be followed
        if chat.required is not None or tool.get("strict"):
            nothing = {"properties": {}, "additionalProperties": False}
            schema |= nothing if tool.get("parameters") is None else tool["parameters"]
        field = place + chat.fields.parameters
        if schema["type"] != "object":
            what = f"is of type {json.dumps(schema['type'])[:80]}"
            raise refusal(field, what, "send the schema of an object")
        schema = _lenient(chat, field, schema, bool(tool.get("strict")))
        _checked(field, schema=schema)
        if form.value and (beyond := beyond_tags(schema)):
            what = f"has {', '.join(beyond)}, which the model's format of calls cannot promise"
            if chat.ignored is None or tool.get("strict"):
                raise refusal(field, what, "leave that out")
            chat.ignored.append(f"{field} {what}")
        found[tool["name"]] = schema
    if not found:
        what = f"names {chat.required!r}, which is not one of the tools"
        raise refusal("tool_choice", what, "name one of them")
    return found


def _lenient(chat: Chat, field: str, schema: Json, is_strict: bool) -> Json:
    """A schema without what llguidance does not support, which is named; as it is where strict."""
    if is_strict or chat.ignored is None:
        return schema
    own = schema.get("x-guidance")
    loose = {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), "lenient": True}}
    try:
        check_structure(StructureConfig(json_schema=json.dumps(schema)))
    except RecursionError:
        return schema
    except DFlashError:
        with suppress(DFlashError):
            said = left_out(StructureConfig(json_schema=json.dumps(loose)))
            chat.ignored.append(f"{field}: {'; '.join(said)}")
            return loose
    return schema


def _checked(
    field: str,
    pair: Pair | None = None,
    schema: Mapping[str, Any] | None = None,
    grammar: str | None = None,
) -> StructureConfig:
    """What llguidance takes; compiled for a model where one is given, so that decoding finds it.

    ApiError about this field for anything else, and where llguidance is missing.
    """
    try:
        text = None if schema is None else json.dumps(schema)
        structure = StructureConfig(json_schema=text, grammar=grammar)
        if pair is None:
            check_structure(structure)
        else:
            constraint_of(pair, DecodeConfig(structure=structure), ())
    except RecursionError:
        raise refusal(field, "is nested too deeply", "make it simpler") from None
    except DFlashError as error:
        raise of_settings(error, {"json_schema": field, "grammar": field}) from None
    return structure
