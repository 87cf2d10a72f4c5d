"""What only a grammar can promise: answers of a JSON schema, tool calls that must come.

The one place where such requests are looked at; what comes of them is a setting of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dflash_mlx.core.config import DecodeConfig, StructureConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.delta import BEGIN, END
from dflash_mlx.engine.grammar import AS_JSON, check_structure, left_out
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import constraint_of
from dflash_mlx.serve.chat import Chat, check_text
from dflash_mlx.serve.errors import of_settings, refusal
from dflash_mlx.session.calls import kinds_of, resolved
from dflash_mlx.session.forms import Form, Json, form_of

_MESSAGE = ("<|channel|>", "<|message|>", "<|end|><|start|>assistant")
_LIMITS = re.compile(r"'(minLength|maxLength|pattern|format|enum|const|\$ref)'")
_MOST = 500  # arguments that stand one by one: thousands overflow llguidance's stack
_ANY, _TEXT = r"(.|\n)*", {"type": "string"}
ANY_OBJECT: Json = {"type": "object"}
_DEFINED = ("$defs", "definitions", "x-guidance")  # of a schema, which its parts need
_NOTES = {"title", "description", "$schema", "$id", "$comment", "default", "examples", "deprecated"}
# What is followed where arguments stand one by one: of a schema, and of one of a text.
_KEPT = {*_DEFINED, "type", "properties", "required", "additionalProperties"} | _NOTES
_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "$ref"} | _NOTES


def structure_of(pair: Pair, chat: Chat, opened: bool = False) -> StructureConfig | None:
    """The grammar that keeps a request's promise, compiled; takes a moment. None where none asks.

    A call that has to come is preferred to an answer of a schema. opened: the prompt begins a
    thought, which comes first. ApiError for what cannot be promised.
    """
    if not chat.asks:
        return None
    if chat.required is not None and not chat.tools:
        raise refusal("tool_choice", "is given without tools", "leave it out, or send tools")
    if chat.schema is not None:
        field = chat.fields.form if chat.schema == ANY_OBJECT else chat.fields.schema
        chat = replace(chat, schema=_lenient(chat, field, chat.schema, chat.is_strict))
        follows = _checked(field, pair, schema=chat.schema)
        if not (chat.tools or opened or chat.wants_thoughts or form_of(pair).has_channels):
            return follows
    field = _asking(chat)
    form = form_of(pair)
    if chat.tools and not form.is_known:
        what = f"needs to know the format of calls, and that of {pair.target.name} is not known"
        raise refusal(field, what, "leave it out, or serve another model")
    tools = _tools(chat, form) if chat.tools else {}
    grammar = grammar_of(form, chat, tools, pair.tokenizer, opened)
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


def beyond_tags(schema: Json) -> list[str]:
    """What no grammar keeps of a schema where arguments stand one by one."""
    each = (resolved(one, schema) for one in (schema.get("properties") or {}).values())
    texts = [one for one in each if kinds_of(one, schema) == {"string"}]
    return sorted({*schema} - _KEPT | {key for one in texts for key in {*one} - _OF_TEXTS})


def grammar_of(
    form: Form, chat: Chat, tools: Mapping[str, Json], tokenizer: Any, opened: bool = False
) -> str:
    """What an answer may be: calls of `tools`, JSON of the schema, or words.

    Where no call has to come and no schema is given, calls stand among words. A thought that the
    prompt has opened comes first, and one that is asked for may come first.
    """
    rules = _Rules(form, tokenizer)
    if tools:
        rules["function"] = " | ".join([rules.function(*each) for each in tools.items()])
    return rules.written(chat, opened)


class _Rules(dict[str, str]):
    """Rules by their names; a term stands in one of them."""

    def __init__(self, form: Form, tokenizer: Any) -> None:
        super().__init__()
        self._form, self._ends = form, tokenizer.eos_token_ids
        vocabulary = tokenizer.get_added_vocab().items()  # some have white space and words in it
        added = {k: v for k, v in vocabulary if k.strip() and not k.isalnum()}
        self._added, longest = added, sorted(map(re.escape, added), key=len, reverse=True)
        self._split = re.compile("|".join([*longest, r"\d+"]))

    def literal(self, text: str) -> list[str]:
        """The terms of a text: added tokens are these, which no text can spell; digits any word."""
        found, at = [], 0
        for each in self._split.finditer(text):
            if each.start() > at:
                found.append(_quoted(text[at : each.start()]))
            token = self._added.get(each[0])
            if token is None:
                found.append(f"/[0-9A-Za-z]{{{len(each[0])}}}/")
            elif token not in self._ends or each.end() < len(text):
                found.append(f"<[{token}]>")
            at = each.end()
        return [*found, *([_quoted(text[at:])] if text[at:] else [])]

    def term(self, text: str) -> str:
        return " ".join(self.literal(text))

    def function(self, name: str, schema: Json) -> str:
        """The rule of a call of a tool, without what stands around calls."""
        form = self._form
        shown = json.dumps(name, ensure_ascii=False)[1:-1] if form.named[:1] == '"' else name
        inside = self._arguments(schema) if form.value else [_json(schema)]
        head = [*self.literal(form.call), _quoted(shown), *self.literal(form.named)]
        return self._rule("function", [*head, *inside, *self.literal(form.done)])

    def _rule(self, kind: str, terms: list[str]) -> str:
        name = f"{kind}_{len(self)}"
        self[name] = " ".join(terms) or '""'
        return name

    def _arguments(self, schema: Json) -> list[str]:
        """Arguments one by one in the order of the schema, those that may be left out, too."""
        form, properties = self._form, schema.get("properties") or {}
        between = self.literal(form.between)
        if not properties and schema.get("additionalProperties", True) is not False:
            key = [*self.literal(form.key), r"/[A-Za-z0-9_-]+/"]
            each = self._rule("any", [*key, *self._value({} if not form.over else _TEXT, schema)])
            return [f"({each} ({' '.join([*between, each])})*)?"]
        first, more = '""', '""'
        for key, one in reversed(properties.items()):
            name = [*self.literal(form.key), _quoted(key)]
            each = self._rule("argument", [*name, *self._value(one, schema)])
            may = key not in schema.get("required", ())
            first = self._rule("first", [each, more, *(["|", first] if may else [])])
            more = self._rule("more", [*between, each, more, *(["|", more] if may else [])])
        return [first]

    def _value(self, schema: Any, root: Json) -> list[str]:
        """What stands behind the name of an argument."""
        form, kinds = self._form, kinds_of(schema, root)
        one = resolved(schema, root)
        raw = bool(form.over or form.quote)
        before, behind = self.literal(form.value + form.quote), form.quote + form.over
        if raw and kinds == {"string"} and ("enum" in one or "const" in one):
            values = one.get("enum", [one.get("const")])
            return [*before, f"({' | '.join(map(_quoted, values))})", *self.literal(behind)]
        if raw and (kinds == {"string"} or ("string" in kinds and not _LIMITS.search(str(one)))):
            return [*before, *self._text(one, behind)]
        defined = {key: root[key] for key in _DEFINED if key in root}
        told = {**schema, **defined} if isinstance(schema, dict) else defined
        return [*self.literal(form.other or form.value), _json(told), *self.literal(form.over)]

    def _text(self, schema: Json, end: str) -> list[str]:
        """A text as it is, up to the first `end`."""
        most = schema.get("maxLength", "")
        number = f"{{{schema.get('minLength', 0)},{most}}}"
        terms = self.literal(end)
        name = f"TEXT_{len(self)}"
        self[name] = rf"/(.|\n){number}/ & ~/{_ANY}{_escaped(end.strip())}{_ANY}/"
        if terms[0].startswith("<["):  # which ends the text before it
            return [name, *terms]
        self[f"WHOLE_{name}"] = f"{name} {terms[0]}"
        self[f"whole_{len(self)}[lazy]"] = f"WHOLE_{name}"
        return [f"whole_{len(self) - 1}", *terms[1:]]

    def written(self, chat: Chat, opened: bool) -> str:
        """All rules, with those of the answer."""
        form, one = self._form, chat.one_call or bool(chat.required) or self._form.is_single
        again, start = self.term(form.again), self.literal(form.start)
        if "function" in self:
            several = "" if one else f"({again} function)*"
            self["inside"] = f"function {several if form.is_section else ''} {self.term(form.end)}"
            self["call"] = " ".join([*start, "inside"])
            self["calls"] = "call" if one or form.is_section else f"call ({again} call)*"
        self["TAIL"] = f"/{_ANY}/"
        if chat.schema is not None:
            body = self.term("<|channel|>final<|message|>" if form.has_channels else "")
            self["answer"] = f"{body} {_json(chat.schema)}"
        if chat.required is not None or chat.schema is not None:
            ways = ["calls"] * ("calls" in self) + ["answer"] * (chat.required is None)
            self["start"] = " | ".join(ways)
        elif form.has_channels:
            begin, body, ends = map(self.term, _MESSAGE)
            self["said"] = f'{begin} ("analysis" | "commentary" | "final") {body} TAIL'
            self["start"] = f"(said {ends})* (said | call)"
        elif not form.start.strip("["):
            self["TAIL"] += rf" & ~/\s*{_escaped(form.mark)}{_ANY}/"
            self["start"] = "calls | TAIL"
        else:
            self._among_words(start, one)
        if first := self._thought(chat, opened):
            self["rest"], self["start"] = self["start"], f"{first} rest"
        return "".join(f"{name}: {rule}\n" for name, rule in self.items())

    def _thought(self, chat: Chat, opened: bool) -> str:
        """The thought that may come first, or has to where it is opened; "" for none."""
        begin, end, behind = BEGIN, END, r'("\n" | "\n\n")?'
        if self._form.has_channels:
            begin, end, behind = "<|channel|>analysis<|message|>", _MESSAGE[2], ""
        elif not (opened or chat.wants_thoughts):
            return ""
        if "said" in self:  # channels, one of which is that of thoughts
            return ""
        thought = " ".join(self._text({}, end))
        return f"{thought if opened else f'({self.term(begin)} {thought})?'} {behind}"

    def _among_words(self, start: list[str], one: bool) -> None:
        """Calls that stand between words, none of which is their first mark."""
        first, token = self._form.start.strip(), start[0].startswith("<[")
        if token and first:
            first = next(text for text in self._added if first.startswith(text))
        tag = _escaped(first)
        self["TAIL"] = rf"/{_ANY}/ & ~/{_ANY}{tag}{_ANY}/"
        self["called"] = " ".join(["TAIL" if token else "head", *start[not token :], "inside"])
        if not token:
            self["head[lazy]"] = rf"/{_ANY}{tag}/"
        self["start"] = "called | TAIL" if one else "called* TAIL"


def _json(schema: Mapping[str, Any]) -> str:
    """A term for JSON of a schema, on one line unless the schema says otherwise."""
    own = schema.get("x-guidance")
    told = {**AS_JSON, **(own if isinstance(own, dict) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': told})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A text in a regular expression of a grammar."""
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)
