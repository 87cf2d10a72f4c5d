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
from dflash_mlx.session.call_grammar import CallGrammar, beyond_tags
from dflash_mlx.session.forms import Form, Json, form_of

_MOST = 500  # arguments that stand one by one: thousands overflow llguidance's stack
ANY_OBJECT: Json = {"type": "object"}


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
        field = chat.fields.form if chat.schema == ANY_OBJECT else chat.fields.schema
        chat = replace(chat, schema=_lenient(chat, field, chat.schema, chat.is_strict))
        follows = _checked(field, pair, schema=chat.schema)
        if not (chat.tools or chat.opened or chat.wants_thoughts or form_of(pair).has_channels):
            return follows
    field = _asking(chat)
    form = form_of(pair)
    if chat.tools and not form.is_known:
        what = f"needs to know the format of calls, and that of {pair.target.name} is not known"
        raise refusal(field, what, "leave it out, or serve another model")
    tools = _tools(chat, form) if chat.tools else {}
    return _checked(field, pair, grammar=grammar_of(form, chat, tools, pair.tokenizer))


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
        schema = {**ANY_OBJECT}  # of arguments that need not follow the tool's
        if chat.required is not None or tool.get("strict"):
            nothing = {"properties": {}, "additionalProperties": False}
            schema |= nothing if tool.get("parameters") is None else tool["parameters"]
        field = place + chat.fields.parameters
        if schema["type"] != "object":
            what = f"is of type {json.dumps(schema['type'])[:80]}"
            raise refusal(field, what, "send the schema of an object")
        schema = _lenient(chat, field, schema, bool(tool.get("strict")))
        _checked(field, schema=schema)
        if form.value and len(schema.get("properties") or {}) > _MOST:
            raise refusal(field, f"has more than {_MOST} properties", "send fewer")
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
    with suppress(DFlashError, RecursionError):
        if said := left_out(StructureConfig(json_schema=json.dumps(loose))):
            chat.ignored.append(f"{field}: {'; '.join(said)}")
            return loose
    return schema


def _checked(
    field: str, pair: Pair | None = None, schema: Json | None = None, grammar: str | None = None
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


def grammar_of(form: Form, chat: Chat, tools: Mapping[str, Json], tokenizer: Any) -> str:
    """What an answer may be: calls of `tools`, JSON of the schema, or words.

    Where no call has to come and no schema is given, calls stand among words. A thought that the
    prompt has opened comes first, and one that is asked for may come first.
    """
    thinks, one = chat.opened or chat.wants_thoughts, chat.one_call or bool(chat.required)
    rules = CallGrammar(form, tokenizer, tools)
    return rules.written(chat.schema, chat.required is not None, one, thinks, chat.opened)
