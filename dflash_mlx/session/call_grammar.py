"""The grammar of an answer with tool calls, by the form in which the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_mlx.engine.delta import BEGIN, END
from dflash_mlx.engine.grammar import AS_JSON
from dflash_mlx.session.calls import kinds_of, resolved
from dflash_mlx.session.forms import Form, Json

_MESSAGE = ("<|channel|>", "<|message|>", "<|end|><|start|>assistant")
_LIMITS = re.compile(r"'(minLength|maxLength|pattern|format|enum|const|\$ref)'")
_ANY, _TEXT = r"(.|\n)*", {"type": "string"}
_DEFINED = ("$defs", "definitions", "x-guidance")  # of a schema, which its parts need
_NOTES = {"title", "description", "$schema", "$id", "$comment", "default", "examples", "deprecated"}
# What is followed where arguments stand one by one: of a schema, and of one of a text.
_KEPT = {*_DEFINED, "type", "properties", "required", "additionalProperties"} | _NOTES
_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", "$ref"} | _NOTES


def beyond_tags(schema: Json) -> list[str]:
    """What no grammar keeps of a schema where arguments stand one by one."""
    each = (resolved(one, schema) for one in (schema.get("properties") or {}).values())
    texts = [one for one in each if kinds_of(one, schema) == {"string"}]
    return sorted({*schema} - _KEPT | {key for one in texts for key in {*one} - _OF_TEXTS})


class CallGrammar(dict[str, str]):
    """Rules by their names; a term stands in one of them."""

    def __init__(self, form: Form, tokenizer: Any, tools: Mapping[str, Json]) -> None:
        """tools: that may be called, each with the schema that its arguments follow."""
        super().__init__()
        self._form, self._ends = form, tokenizer.eos_token_ids
        vocabulary = tokenizer.get_added_vocab().items()  # some have white space and words in it
        added = {k: v for k, v in vocabulary if k.strip() and not k.isalnum()}
        self._added, longest = added, sorted(map(re.escape, added), key=len, reverse=True)
        self._split = re.compile("|".join([*longest, r"\d+"]))
        if tools:
            self["function"] = " | ".join([self._function(*each) for each in tools.items()])

    def _literal(self, text: str) -> list[str]:
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

    def _term(self, text: str) -> str:
        return " ".join(self._literal(text))

    def _function(self, name: str, schema: Json) -> str:
        """The rule of a call of a tool, without what stands around calls."""
        form = self._form
        shown = json.dumps(name, ensure_ascii=False)[1:-1] if form.named[:1] == '"' else name
        inside = self._arguments(schema) if form.value else [_json(schema)]
        head = [*self._literal(form.call), _quoted(shown), *self._literal(form.named)]
        return self._rule("function", [*head, *inside, *self._literal(form.done)])

    def _rule(self, kind: str, terms: list[str]) -> str:
        name = f"{kind}_{len(self)}"
        self[name] = " ".join(terms) or '""'
        return name

    def _arguments(self, schema: Json) -> list[str]:
        """Arguments one by one in the order of the schema, those that may be left out, too."""
        form, properties = self._form, schema.get("properties") or {}
        between = self._literal(form.between)
        if not properties and schema.get("additionalProperties", True) is not False:
            key = [*self._literal(form.key), r"/[A-Za-z0-9_-]+/"]
            each = self._rule("any", [*key, *self._value({} if not form.over else _TEXT, schema)])
            return [f"({each} ({' '.join([*between, each])})*)?"]
        first, more = '""', '""'
        for key, one in reversed(properties.items()):
            name = [*self._literal(form.key), _quoted(key)]
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
        before, behind = self._literal(form.value + form.quote), form.quote + form.over
        if raw and kinds == {"string"} and ("enum" in one or "const" in one):
            values = one.get("enum", [one.get("const")])
            return [*before, f"({' | '.join(map(_quoted, values))})", *self._literal(behind)]
        if raw and (kinds == {"string"} or ("string" in kinds and not _LIMITS.search(str(one)))):
            return [*before, *self._text(one, behind)]
        defined = {key: root[key] for key in _DEFINED if key in root}
        told = {**schema, **defined} if isinstance(schema, dict) else defined
        return [*self._literal(form.other or form.value), _json(told), *self._literal(form.over)]

    def _text(self, schema: Json, end: str) -> list[str]:
        """A text as it is, up to the first `end`."""
        most = schema.get("maxLength", "")
        number = f"{{{schema.get('minLength', 0)},{most}}}"
        terms = self._literal(end)
        name = f"TEXT_{len(self)}"
        self[name] = rf"/(.|\n){number}/ & ~/{_ANY}{_escaped(end.strip())}{_ANY}/"
        if terms[0].startswith("<["):  # which ends the text before it
            return [name, *terms]
        self[f"WHOLE_{name}"] = f"{name} {terms[0]}"
        self[f"whole_{len(self)}[lazy]"] = f"WHOLE_{name}"
        return [f"whole_{len(self) - 1}", *terms[1:]]

    def written(
        self, schema: Json | None, must_call: bool, one: bool, thinks: bool, opened: bool
    ) -> str:
        """All rules, with those of the answer, which may be JSON of a schema.

        one: it has at most one call. thinks: a thought may come first, or has to where it is
        `opened`.
        """
        form, one = self._form, one or self._form.is_single
        again, start = self._term(form.again), self._literal(form.start)
        if "function" in self:
            several = "" if one else f"({again} function)*"
            self["inside"] = f"function {several if form.is_section else ''} {self._term(form.end)}"
            self["call"] = " ".join([*start, "inside"])
            self["calls"] = "call" if one or form.is_section else f"call ({again} call)*"
        self["TAIL"] = f"/{_ANY}/"
        if schema is not None:
            body = self._term("<|channel|>final<|message|>" if form.has_channels else "")
            self["answer"] = f"{body} {_json(schema)}"
        if must_call or schema is not None:
            ways = ["calls"] * ("calls" in self) + ["answer"] * (not must_call)
            self["start"] = " | ".join(ways)
        elif form.has_channels:
            begin, body, ends = map(self._term, _MESSAGE)
            self["said"] = f'{begin} ("analysis" | "commentary" | "final") {body} TAIL'
            self["start"] = f"(said {ends})* (said | call)"
        elif not form.start.strip("["):
            self["TAIL"] += rf" & ~/\s*{_escaped(form.mark)}{_ANY}/"
            self["start"] = "calls | TAIL"
        else:
            self._among_words(start, one)
        if first := self._thought(thinks, opened):
            self["rest"], self["start"] = self["start"], f"{first} rest"
        return "".join(f"{name}: {rule}\n" for name, rule in self.items())

    def _thought(self, thinks: bool, opened: bool) -> str:
        """The thought that may come first, or has to where it is opened; "" for none."""
        begin, end, behind = BEGIN, END, r'("\n" | "\n\n")?'
        if self._form.has_channels:
            begin, end, behind = "<|channel|>analysis<|message|>", _MESSAGE[2], ""
        elif not thinks:
            return ""
        if "said" in self:  # channels, one of which is that of thoughts
            return ""
        thought = " ".join(self._text({}, end))
        return f"{thought if opened else f'({self._term(begin)} {thought})?'} {behind}"

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
