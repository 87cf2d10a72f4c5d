"""What only a grammar can promise: answers of a JSON schema, tool calls that must come.

The one place where such requests are looked at; what comes of them is a setting of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.grammar import AS_JSON, check_structure, left_out
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import constraint_of
from dflash_mlx.serve.chat import TEMPLATE_FAULTS, Chat, Json, call_of, check_text
from dflash_mlx.serve.errors import of_settings, refusal
from dflash_mlx.serve.reading import PARSER_FAULTS

_PROBE, _GIVEN = "probe", {"probe": 1}  # a call that templates are asked to write


@dataclass(frozen=True)
class CallForm:
    """How a model's template writes a call: JSON between two tags."""

    start: str  # the first tag, as a term of a grammar
    end: str
    start_text: str
    before: str  # what stands between the first tag and the JSON
    after: str
    key: str  # of the arguments


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
    if (form := pair.recall(("form of calls",), lambda: _learn(pair))) is None:
        what = f"needs to know the format of calls; those of {pair.target.name} are not plain JSON"
        raise refusal(field, what, "leave it out, or serve another model")
    return _checked(field, pair, grammar=grammar_of(form, chat, _tools(chat)))


def _asking(chat: Chat) -> str:
    """The field because of which calls need a grammar."""
    if chat.required is not None:
        return "tool_choice"
    if chat.schema is not None:
        return chat.fields.form
    strict = [bool(tool["function"].get("strict")) for tool in chat.tools]
    return chat.fields.tool.format(strict.index(True)) + "strict"


def _tools(chat: Chat) -> dict[str, Json]:
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


def _learn(pair: Pair) -> CallForm | None:
    """The form of calls as the template writes one; None if no JSON that mlx-lm's parser reads."""
    tokenizer = pair.tokenizer
    tags = tokenizer.tool_call_start, tokenizer.tool_call_end
    if not all(tags):
        return None
    try:
        inside = _written(pair, *tags)
        value = json.loads(inside)
        name, key = value
        read = tokenizer.tool_parser(inside, [])
        right = (value[name], value[key]) == (_PROBE, _GIVEN) == (read["name"], read["arguments"])
    except (*TEMPLATE_FAULTS, *PARSER_FAULTS):
        return None
    text = inside.strip()
    if not right or name != "name" or text != _object(_PROBE, key) + json.dumps(_GIVEN) + "}":
        return None
    start, end = (_term(tag, tokenizer) for tag in tags)
    before, _, after = inside.partition(text)
    return CallForm(start, end, tags[0], before, after, key)


def _written(pair: Pair, start: str, end: str) -> str:
    """What the template writes between the tags of a call; the last, as prompts explain them."""
    function = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
    call = call_of(_PROBE, _GIVEN, "call_0")
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    more = {**pair.template, "tools": [{"type": "function", "function": function}]}
    text = pair.tokenizer.apply_chat_template(talk, tokenize=False, **more)
    return str(text).rpartition(start)[2].partition(end)[0]


def _term(tag: str, tokenizer: Any) -> str:
    """A tag in a grammar: where it is one token, that one, which no text can spell."""
    tokens = tokenizer.encode(tag, add_special_tokens=False)
    return f"<[{tokens[0]}]>" if len(tokens) == 1 else _quoted(tag)


def grammar_of(form: CallForm, chat: Chat, tools: Mapping[str, Json]) -> str:
    """What an answer may be, in Lark's form: calls of `tools`, JSON of the schema, or words.

    Where no call has to come and no schema is given, calls stand among words.
    """
    one = chat.one_call or bool(chat.required)
    begins = [_quoted(_object(name, form.key)) for name in tools]
    each = [f'{b} {_json(s)} "}}"' for b, s in zip(begins, tools.values(), strict=True)]
    rules = {f"function_{i}": rule for i, rule in enumerate(each)}
    before, after = (f"{_quoted(text)} " if text else "" for text in (form.before, form.after))
    rules = {
        "function": " | ".join(rules),
        **rules,
        "inside": f"{before}function {after}{form.end}",
    }
    if chat.required is not None or chat.schema is not None:
        rules["call"] = f"{form.start} inside"
        rules["calls"] = "call" if one else r'call ("\n" call)*'
        rules["start"] = "calls"
        if chat.required is None:
            rules |= {"start": "calls | answer", "answer": _json(chat.schema or {})}
    else:
        tag = "".join(f"\\x{{{ord(c):x}}}" for c in form.start_text)
        rules["TAIL"] = rf"/(.|\n)*/ & ~/(.|\n)*{tag}(.|\n)*/"
        is_token = form.start.startswith("<[")  # which ends the words before it
        rules["called"] = f"TAIL {form.start} inside" if is_token else "head inside"
        rules |= {} if is_token else {"head[lazy]": rf"/(.|\n)*{tag}/"}
        rules["start"] = "called | TAIL" if one else "called* TAIL"
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _object(name: str, key: str) -> str:
    """The JSON of a call up to its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, {json.dumps(key)}: '


def _json(schema: Mapping[str, Any]) -> str:
    """A term for JSON of a schema, on one line unless the schema says otherwise."""
    own = schema.get("x-guidance")
    told = {**AS_JSON, **(own if isinstance(own, dict) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': told})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
