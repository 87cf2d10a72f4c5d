"""Tool calls as a grammar, in the form in which the model's own template writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.engine.grammar import AS_JSON
from dflash_mlx.engine.pair import Pair
from dflash_mlx.serve.prompts import TEMPLATE_FAULTS, call_of
from dflash_mlx.serve.reading import PARSER_FAULTS

Json = dict[str, Any]

_PROBE, _GIVEN = "probe", {"probe": 1}


@dataclass(frozen=True)
class CallForm:
    """How a template writes a call: JSON between two tags.

    start, end: the tags, as terms of a grammar. start_text: the first one as text. before, after:
    what stands between tags and JSON. key: of the arguments.
    """

    start: str
    end: str
    start_text: str
    before: str
    after: str
    key: str


def call_form(pair: Pair) -> CallForm | None:
    """The form of this model's calls; None where it is no JSON that mlx-lm's parser reads."""
    return pair.recall(("form of calls",), lambda: _learn(pair))


def _learn(pair: Pair) -> CallForm | None:
    """Let the template write a call, and see what it looks like."""
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
    start, end = (_term(tag, pair.tokenizer) for tag in tags)
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


def calls_only(form: CallForm, tools: Sequence[Mapping[str, Any]], one: bool) -> str:
    """A grammar of a call of one of `tools`, or of several calls."""
    return "start: calls\n" + _calls(form, tools, one)


def calls_or_json(
    form: CallForm, tools: Sequence[Mapping[str, Any]], one: bool, schema: Mapping[str, Any]
) -> str:
    """A grammar of calls, or else of a JSON value."""
    return f"start: calls | answer\nanswer: {_json(schema)}\n" + _calls(form, tools, one)


def words_and_calls(form: CallForm, tools: Sequence[Mapping[str, Any]], one: bool) -> str:
    """A grammar of words in which calls, where there are any, are those of `tools`."""
    tag = "".join(f"\\x{{{ord(c):x}}}" for c in form.start_text)
    words = f"TAIL: /(.|\\n)*/ & ~/(.|\\n)*{tag}(.|\\n)*/\n"
    if form.start.startswith("<["):  # a token of its own, which ends the words before it
        begin, opened = "TAIL", ""
    else:
        begin, opened = "head", f"head[lazy]: /(.|\\n)*{tag}/\n"
    inner = f"call_inside: {_inside(form, tools)}\n{_functions(form, tools)}"
    first = f"TAIL {form.start}" if begin == "TAIL" else "head"
    call = f"called: {first} call_inside\n"
    start = "start: called | TAIL\n" if one else "start: called* TAIL\n"
    return start + call + inner + words + opened


def parameters_of(tool: Mapping[str, Any], as_given: bool = True) -> Json:
    """The schema of a tool's arguments; any object where it is not to be followed."""
    given = tool["function"].get("parameters") if as_given else {}
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **given}


def _calls(form: CallForm, tools: Sequence[Mapping[str, Any]], one: bool) -> str:
    calls = "call" if one else r'call ("\n" call)*'
    call = f"calls: {calls}\ncall: {form.start} {_inside(form, tools)}\n"
    return call + _functions(form, tools)


def _inside(form: CallForm, tools: Sequence[Mapping[str, Any]]) -> str:
    """What follows the first tag, the last tag included."""
    before, after = (f"{_quoted(text)} " if text else "" for text in (form.before, form.after))
    return f"{before}function {after}{form.end}"


def _functions(form: CallForm, tools: Sequence[Mapping[str, Any]]) -> str:
    names = " | ".join(f"function_{i}" for i in range(len(tools)))
    lines = [f"function: {names}"]
    for i, tool in enumerate(tools):
        begin = _quoted(_object(tool["function"]["name"], form.key))
        lines.append(f'function_{i}: {begin} {_json(tool["function"]["parameters"])} "}}"')
    return "\n".join(lines) + "\n"


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
