"""The forms in which models write tool calls: one table, which grammars and readers are made of.

A model's form is the one that its chat template writes, with that template's spacing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import regex  # as mlx-lm's parsers have it: it can say that a text may still come to match
import tomlkit
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
    again: str = "\n"  # between calls
    is_single: bool = False  # only one call comes
    is_section: bool = False  # start and end are around all calls, not around each
    has_channels: bool = False  # an answer is messages with headers
    is_known: bool = True  # else only mlx-lm knows what stands between start and end
    takes_text: bool = False  # the template wants arguments as JSON text
    example: str = ""  # of a call
    in_prompt: bool = False  # the template knows no tools, so the system prompt tells of them
    parse: Callable[..., Any] | None = field(default=None, compare=False)  # mlx-lm's parser

    @property
    def mark(self) -> str:
        """The text with which a call begins."""
        return self.start.strip() or self.call.strip()

    def learned(self, text: str) -> Form | None:
        """With the spacing of a text that has the probe in this form; None where it has not."""
        literals = {**{k: getattr(self, k) for k in _PIECES}, "other": self.other or self.value}
        part = {k: f"(?P<{k}>{loose(v)}{_TAILS.get(k, '')})" for k, v in literals.items()}
        inside = r"\{[^{}]*\}"
        if self.value:
            mark = regex.escape(self.quote) or ("" if self.over else "[\"']")
            inside = f"{part['key']}first{part['value']}{mark}alpha{mark}{part['over']}"
            inside += rf"\s*{self.between.strip()}\s*(?P=key)second{part['other']}7(?P=over)"
        head = f"{part['start']}{part['call']}{_PROBE}{part['named']}"
        found = regex.search(rf"\s*(?P<example>{head}{inside}{part['done']}{part['end']})", text)
        return None if found is None else replace(self, **found.groupdict())


def plain(name: str, arguments: Any) -> str:
    """A call in the form for models whose templates know none."""
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{told}\n</tool_call>"


def loose(literal: str) -> str:
    """A regular expression for a literal, whatever its white space and its digits are."""
    words = r"\s*".join(map(regex.escape, literal.split()))
    return (r"\s*" if literal else "") + str(regex.sub(r"\d+", r"\\w+", words))


_PIECES = ("start", "call", "named", "done", "end", "key", "value", "over")
_TAILS = {"value": r"\s*", "other": r"\s*", "named": r"\s*?"}  # white space behind the others
# The call that templates are asked to write.
_PROBE, _GIVEN, _USER = "some_function", {"first": "alpha", "second": 7}, "words of a user"
_TYPES = {"first": {"type": "string", "description": ""}, "second": {"type": "integer"}}
_OBJECT = {"type": "object", "properties": _TYPES, "required": [*_GIVEN]}
_FUNCTION = {"name": _PROBE, "description": "", "parameters": _OBJECT}
_TOOLS = [{"type": "function", "function": _FUNCTION}]

_TABLE = tomlkit.parse((Path(__file__).parent / "forms.toml").read_text(encoding="utf-8")).unwrap()
FORMS = tuple(Form(*row.pop("call").split("¦"), **row) for row in _TABLE["form"])
PLAIN = replace(FORMS[0], example=plain(_PROBE, _GIVEN), in_prompt=True)


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
        if form.mark.startswith(start) and form.end.endswith(end):
            return replace(form, parse=parse)
    return Form(start=start, end=end, is_known=False, parse=parse)


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
