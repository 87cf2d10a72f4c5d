"""The forms in which models write tool calls: one table, which grammars and readers are made of.

A model's form is the one that its chat template writes, with that template's spacing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import regex  # as mlx-lm's parsers have it: it can say that a text may still come to match
from jinja2 import TemplateError

from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.read import unread_arguments

Json = dict[str, Any]
TEMPLATE_FAULTS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError),
)
PARSER_FAULTS = (*TEMPLATE_FAULTS, SyntaxError, MemoryError)


@dataclass(frozen=True)
class Form:
    """A call as it stands: start, call, NAME, named, ARGUMENTS, done, end.

    Arguments are a JSON object or, where there is a `value`, each is key, KEY, value, VALUE, over.
    Where a call is read, white space may be another, and digits stand for any word.
    """

    start: str = ""
    call: str = ""
    named: str = ""
    done: str = ""
    end: str = ""
    key: str = ""
    value: str = ""
    over: str = ""  # where it is empty, values are literals, which end by themselves
    other: str = ""  # in place of `value` before what is no string, where that differs
    quote: str = ""  # around a string
    between: str = ""  # arguments
    again: str | None = "\n"  # between calls; None where there is only one
    is_section: bool = False  # start and end are around all calls, not around each
    has_channels: bool = False  # an answer is messages with headers
    is_known: bool = True  # else only mlx-lm knows what stands between start and end
    takes_text: bool = False  # the template wants arguments as JSON text
    in_prompt: bool = False  # the template knows no tools, so the system prompt tells of them
    parse: Callable[..., Any] | None = field(default=None, compare=False)  # mlx-lm's parser

    @property
    def mark(self) -> str:
        """The text with which a call begins."""
        return self.start.strip() or self.call.strip()

    def write(self, name: str, arguments: Json) -> str:
        """A call in this form."""
        inside = json.dumps(arguments, ensure_ascii=False)
        if self.value:
            inside = self.between.join(self._argument(*each) for each in arguments.items())
        return f"{self.start}{self.call}{name}{self.named}{inside}{self.done}{self.end}"

    def _argument(self, key: str, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and (self.quote or self.over):
            text = f"{self.quote}{value}{self.quote}"
        before = self.value if isinstance(value, str) else self.other or self.value
        return f"{self.key}{key}{before}{text}{self.over}"

    def learned(self, text: str) -> Form | None:
        """With the spacing of a text that has the probe in this form; None where it has not."""
        literals = {name: getattr(self, name) for name in (*_LITERALS, *_TAILS)}
        literals["other"] = self.other or self.value
        part = {k: f"(?P<{k}>{loose(v)}{_TAILS.get(k, '')})" for k, v in literals.items()}
        inside = r"(?P<given>\{[^{}]*\})"
        if self.value:
            mark = regex.escape(self.quote) or ("" if self.over else "[\"']")
            inside = f"{part['key']}first{part['value']}{mark}alpha{mark}{part['over']}"
            inside += rf"\s*{self.between.strip()}\s*(?P=key)second{part['other']}7(?P=over)"
        head = f"{part['start']}{part['call']}{_PROBE}{part['named']}"
        found = regex.search(head + inside + part["done"] + part["end"], text)
        if found is None:
            return None
        own = found.groupdict()
        if (given := own.pop("given", None)) is not None and json.loads(given) != _GIVEN:
            return None
        return replace(self, **{**own, "start": own["start"].lstrip()})


def _cut(row: str) -> Json:
    return dict(zip(_PLACES, row.split("¦"), strict=False))


def loose(literal: str) -> str:
    """A regular expression for a literal, whatever its white space and its digits are."""
    words = r"\s*".join(map(regex.escape, literal.split()))
    return (r"\s*" if literal else "") + str(regex.sub(r"\d+", r"\\w+", words))


_PLACES = ("start", "call", "named", "done", "end", "key", "value", "over")
_LITERALS = ("start", "call", "done", "end", "key", "over")
_TAILS = {"value": r"\s*", "other": r"\s*", "named": r"\s*?"}  # white space behind the others
# The call that templates are asked to write.
_PROBE, _GIVEN, _USER = "probe", {"first": "alpha", "second": 7}, "words of a user"
_TYPES = {"first": {"type": "string", "description": ""}, "second": {"type": "integer"}}
_OBJECT = {"type": "object", "properties": _TYPES, "required": [*_GIVEN]}
_FUNCTION = {"name": _PROBE, "description": "", "parameters": _OBJECT}
_TOOLS = [{"type": "function", "function": _FUNCTION}]

_SOLE: Json = {"again": ""}
_SECTION: Json = {"is_section": True}
_LIST: Json = {"again": ", ", "is_section": True}
_DEEPSEEK: Json = {"other": '" string="false">', **_SECTION}
_TAGS = "¦\n<function=¦>¦\n</function>¦\n</{}>¦\n<parameter=¦>\n¦\n</parameter>"
_PAIRS = "<{0}tool_call>¦¦¦¦\n</{0}tool_call>¦\n<{0}arg_key>¦</{0}arg_key>\n<{0}arg_value>¦"
_INVOKE = '<{0}>¦\n<{1}invoke name="¦">¦\n</{1}invoke>¦\n</{0}>¦\n<{1}parameter name="¦"'
_DSML, _IS_TEXT = "｜DSML｜", ' string="true">¦</｜DSML｜parameter>'
_BEGINS = "<｜tool▁calls▁begin｜>¦<｜tool▁call▁begin｜>"
_ENDS = "<｜tool▁call▁end｜>¦<｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|>¦<|tool_call_begin|>functions.¦:0<|tool_call_argument_begin|>"
# As most templates of a kind write a call, with a bar where something of its own stands.
_TABLE: tuple[tuple[str, Json], ...] = (
    ('<tool_call>¦\n{"name": "¦", "arguments": ¦}¦\n</tool_call>', {}),
    ('<tool_call>¦\n{"name": "¦", "parameters": ¦}¦\n</tool_call>', {}),
    (f"<tool_call>{_TAGS.format('tool_call')}", {}),  # Qwen 3.5 and Qwen3-Coder
    (f"<seed:tool_call>{_TAGS.format('seed:tool_call')}", {}),
    ("<function=¦¦>¦¦</function>", _SOLE),  # Llama 3.1 with functions of one's own
    (_PAIRS.format("") + "</arg_value>", {}),  # GLM 4
    (_PAIRS.format("longcat_") + "</longcat_arg_value>", {}),
    (_INVOKE.format("minimax:tool_call", "") + ">¦</parameter>", _SECTION),
    (_INVOKE.format("atem:function_calls", "atem:") + ">¦</atem:parameter>", _SECTION),
    (_INVOKE.format(f"{_DSML}function_calls", _DSML) + _IS_TEXT, _DEEPSEEK),  # 3.2
    (_INVOKE.format(f"{_DSML}tool_calls", _DSML) + _IS_TEXT, _DEEPSEEK),  # 4
    (f"{_BEGINS}function<｜tool▁sep｜>¦\n```json\n¦\n```{_ENDS}", _SECTION),  # 3
    (f"{_BEGINS}¦<｜tool▁sep｜>¦{_ENDS}", _SECTION | _SOLE),  # 3.1
    ("<|tool_call>¦call:¦{¦}¦<tool_call|>¦¦:", {"quote": '<|"|>', "between": ",", **_SOLE}),
    (
        "<start_function_call>¦call:¦{¦}¦<end_function_call>¦¦:",
        {"quote": "<escape>", "between": ",", **_SOLE},
    ),
    (f"{_KIMI}¦<|tool_call_end|>¦<|tool_calls_section_end|>", _SECTION | _SOLE),
    ("[TOOL_CALLS]¦¦[ARGS]", _SOLE),  # Mistral
    ("[TOOL_CALLS]¦¦[CALL_ID]000000000[ARGS]", _SOLE),
    ('[TOOL_CALLS][¦{"name": "¦", "arguments": ¦}¦]', _LIST),
    ('[TOOL_CALLS][¦{"name": "¦", "arguments": ¦, "id": "000000000"}¦]', _LIST),
    ('<tool_calls>[¦{"name": "¦", "arguments": ¦}¦]</tool_calls>', _LIST),
    ('<TOOLCALL>[¦{"name": "¦", "arguments": ¦}¦]</TOOLCALL>', _LIST),
    ("<|tool_call_start|>[¦¦(¦)¦]<|tool_call_end|>¦¦=", {"between": ", ", **_LIST}),  # LFM2
    ("[¦¦(¦)¦]¦¦=", {"between": ", ", **_LIST}),  # Llama
    ('¦{"name": "¦", "parameters": ¦}', {"again": None}),  # Llama 3
    (
        "<|channel|>commentary¦ to=functions.¦ <|constrain|>json<|message|>¦¦<|call|>",
        {"again": None, "has_channels": True},  # OpenAI's harmony
    ),
)
FORMS = tuple(replace(Form(), **_cut(row), **more) for row, more in _TABLE)
PLAIN = replace(FORMS[0], in_prompt=True)  # where the template writes no calls


def form_of(pair: Pair) -> Form:
    """How the model writes calls, as its template or mlx-lm says; found once."""
    return pair.recall(("form of calls",), lambda: _find(pair))


def _find(pair: Pair) -> Form:
    tokenizer = pair.tokenizer
    start, end, parse = tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser
    in_prompt, text = bool(unread_arguments(tokenizer, ["tools"])), ""
    for takes_text in (False, True):
        text = text or _written(pair, takes_text)
        found = next(filter(None, (form.learned(text) for form in FORMS)), None)
        if f"to=functions.{_PROBE}" in text:  # what gpt-oss itself writes stands in other order
            found = FORMS[-1]
        if found is not None:
            found = replace(found, in_prompt=in_prompt, takes_text=takes_text)
            return replace(found, parse=parse if found.mark == start else None)
    if in_prompt or not tokenizer.has_tool_calling:
        return PLAIN
    for form in FORMS:
        if form.mark.startswith(start) and form.end.endswith(end) and _reads(parse, form, start, end):
            return replace(form, parse=parse)
    return Form(start=start, end=end, is_known=False, parse=parse)


def _reads(parse: Callable[..., Any], form: Form, start: str, end: str) -> bool:
    """Whether a parser of mlx-lm reads a form."""
    with suppress(*PARSER_FAULTS):
        text = form.write(_PROBE, _GIVEN).removeprefix(start).removesuffix(end)
        read = parse(text, _TOOLS)
        (read,) = read if isinstance(read, list) else [read]
        return bool((read["name"], read["arguments"]) == (_PROBE, _GIVEN))
    return False


def _written(pair: Pair, takes_text: bool) -> str:
    """What the template writes for a call; "" where it cannot."""
    function = {"name": _PROBE, "arguments": json.dumps(_GIVEN) if takes_text else _GIVEN}
    calls = [{"id": "000000000", "type": "function", "function": function}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    talk = [{"role": "user", "content": _USER}, said]
    with suppress(*TEMPLATE_FAULTS):
        more = {**pair.template, "tools": _TOOLS}
        text = pair.tokenizer.apply_chat_template(talk, tokenize=False, **more)
        return str(text).rpartition(_USER)[2]
    return ""
