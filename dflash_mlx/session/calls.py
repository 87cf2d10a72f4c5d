"""Reads the calls in an answer as they are made, by the form in which the model writes them."""

from __future__ import annotations

import ast
import json
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from dflash_mlx.session.forms import PARSER_FAULTS, Form, Json, loose

WORDS, THOUGHT, CALL = "words", "thought", "call"
_NAME = r'[^\s"`<>(){}\[\]:]'  # a character of a tool's name
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
_KINDS |= {list: "array", type(None): "null"}


@dataclass(frozen=True)
class Part:
    """Some of an answer: a few of its words, some of a thought, a tool call or some of one."""

    kind: str  # WORDS, THOUGHT or CALL
    text: str  # of a call its arguments, a JSON object; of a part of a call some of that
    name: str = ""  # of the tool that is called
    identity: str = ""  # of the call, which all of its parts share


class _Patterns:
    """What the pieces of a call look like in a form."""

    def __init__(self, form: Form) -> None:
        def compiled(text: str) -> Any:
            return regex.compile(text, regex.DOTALL)

        name = rf"{_NAME}{{1,200}}(?!{_NAME})(?=.)"
        name = r'[^"\\]{1,200}' if form.named.startswith('"') else name
        named = rf"\s*(?P<name>{name}){loose(form.named)}"
        if form.has_channels:  # a header, in which the name stands at one of two places
            named = rf".*?to=functions\.(?P<name>{_NAME}+)(?!{_NAME}).*?<\|message\|>"
        call = named if form.has_channels else loose(form.call) + named
        brace = "" if form.value else r"\s*(?=\{)"
        self.opening = compiled(rf"\s*,?\s*(?:{loose(form.start)})?{call}{brace}")
        self.done, self.end = compiled(loose(form.done)), compiled(loose(form.end))
        closing, key = loose(form.done or form.end), loose(form.key)
        self.closing = compiled(f"(?={closing})")
        # A raw value is without one line break on each side, where the form has them.
        line = r"(?:\n|(?=[^\n]))" if form.value.endswith("\n") else ""
        before = "|".join(loose(each) + line for each in (form.value, form.other) if each)
        self.argument = compiled(rf"\s*,?{key}\s*(?P<key>[^\n]{{1,200}}?)(?:{before})")
        line = r"\n?" if form.over.startswith("\n") else ""
        self.over = compiled(rf"{line}{regex.escape(form.over.strip())}(?={key}|{closing})")
        self.quote, self.other = compiled(regex.escape(form.quote)), compiled("(?=.)")


_patterns = lru_cache(64)(_Patterns)
# Pieces of arguments, and what is found of a pattern; None where more text is needed.
Pieces = Generator["str | None", None, None]
Found = Generator[None, None, Any]


class CallReader:
    """Reads what begins with a form's mark, up to the form's end."""

    def __init__(self, form: Form, tools: Mapping[str, Json], streams: bool, one: bool) -> None:
        self.at = 0  # characters that are read
        self.is_told = False  # some of a call that is not over
        self.is_over = self.is_broken = False
        self._form, self._tools, self._streams, self._one = form, tools, streams, one
        self._text, self._finished = "", False
        self._steps = self._section()

    def read(self, text: str, finished: bool) -> Iterator[Part]:
        """What is certain of a text that grows; one of PARSER_FAULTS where it is no call."""
        self._text, self._finished = text, finished
        for part in self._steps:
            if part is None:
                return
            yield part
        self.is_over = True

    def _section(self) -> Iterator[Part | None]:
        patterns = _patterns(self._form)
        found = yield from self._expect(patterns.opening)
        while found.re is patterns.opening and not found.partial:
            name, identity = found["name"], f"call_{uuid.uuid4().hex[:24]}"
            schema = self._tools.get(name)
            early, whole = self._streams and schema is not None, ""
            pieces = (
                self._arguments(schema or {}) if self._form.value else self._literal(('"',), True)
            )
            if not early:
                whole = yield from _joined(pieces)
            for piece in pieces:
                self.is_told = True
                yield None if piece is None else Part(CALL, piece, name, identity)
            yield from self._expect(patterns.done)
            found = yield from self._expect(patterns.opening, patterns.end, may_end=True)
            if not early:
                yield whole_call(name, whole, (), identity)
            self.is_told = False
            if self._one:
                return

    def _expect(self, *patterns: Any, may_end: bool = False) -> Found:
        """The first of these that stands here; ValueError where none can."""
        while True:
            whole = self._finished and not may_end
            each = (each.match(self._text, self.at, partial=not whole) for each in patterns)
            if (found := next(filter(None, each), None)) is None:
                raise ValueError("a call has another form")
            if not found.partial or self._finished:
                self.at = found.end()
                return found
            yield None

    def _arguments(self, schema: Json) -> Pieces:
        """Arguments that stand one by one, as JSON."""
        patterns, told = _patterns(self._form), "{"
        while (found := (yield from self._expect(patterns.closing, patterns.argument))).re.groups:
            yield f"{told}{json.dumps(found['key'], ensure_ascii=False)}: "
            own = (schema.get("properties") or {}).get(found["key"])
            yield from self._value(kinds_of(own, schema))
            told = ", "
        yield "}" if told == ", " else "{}"

    def _value(self, kinds: set[str]) -> Pieces:
        """A value as JSON: a text as it comes, anything else when it is whole."""
        patterns, quote, quoted = _patterns(self._form), self._form.quote, False
        if quote:
            quoted = (yield from self._expect(patterns.quote, patterns.other)).re is patterns.quote
        if quoted or self._form.over:
            pieces = self._until(patterns.quote if quoted else patterns.over)
        else:
            pieces = self._literal((quote, '"') if quote else ('"', "'"))
        is_text = kinds == {"string"} and (quoted or self._form.over != "")
        if is_text or (quoted and not kinds):
            yield '"'
            for piece in pieces:
                yield piece and json.dumps(piece, ensure_ascii=False)[1:-1]
            yield '"'
            return
        whole = yield from _joined(pieces)
        yield json.dumps(value_of(whole, kinds, quote), ensure_ascii=False)

    def _until(self, pattern: Any) -> Pieces:
        """The text before a pattern."""
        while True:
            found = pattern.search(self._text, self.at, partial=not self._finished)
            if found is None and self._finished:
                raise ValueError("a value has no end")
            begin, self.at = self.at, len(self._text) if found is None else found.start()
            if self.at > begin:
                yield self._text[begin : self.at]
            if found is not None and not found.partial:
                self.at = found.end()
                return
            yield None

    def _literal(self, quotes: tuple[str, ...], is_object: bool = False) -> Pieces:
        """A value up to where its brackets close or, unless it is an object, to what follows."""
        depth, inside, is_over = 0, "", False
        while not is_over:
            begin, text = self.at, self._text
            while self.at < len(text) and not is_over:
                here = text[self.at]
                marks = (inside,) if inside else quotes
                mark = next((each for each in marks if text.startswith(each, self.at)), "")
                if self._is_unclear(marks, inside):
                    break
                if inside and here == "\\" and len(inside) == 1:
                    self.at += 2
                elif inside or mark:
                    inside = "" if inside and mark else inside or mark
                    self.at += len(mark) or 1
                elif not depth and not is_object and here in ",)]}":
                    is_over = True
                else:
                    depth += (here in "{[(") - (here in "}])")
                    self.at += 1
                    is_over = is_object and depth == 0
            if self.at > begin:
                yield text[begin : self.at]
            if not is_over:
                if self._finished:
                    raise ValueError("a value has no end")
                yield None

    def _is_unclear(self, marks: tuple[str, ...], inside: str) -> bool:
        """Whether more text has to say what stands here: a mark, an escape, or the call's end.

        A string has no raw line break: where one follows the end before the next quote, the string
        had no end. ValueError for that.
        """
        rest, end = self._text[self.at : self.at + 64], self._form.end.strip()
        end = end if inside and self._form.named[:1] == '"' else ""
        if any(each.startswith(rest) and each != rest for each in (*marks, end, "\\\\")):
            return True
        if not end or not rest.startswith(end):
            return False
        behind, quote, _ = self._text[self.at + len(end) :].partition(inside)
        if "\n" in behind or (self._finished and not quote):
            raise ValueError("a string has no end")
        return not quote


def _joined(pieces: Pieces) -> Generator[None, None, str]:
    """All pieces, when they have come."""
    whole = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            whole.append(piece)
    return "".join(whole)


def value_of(text: str, kinds: set[str], quote: str = "") -> Any:
    """What a text is among the types that a schema allows; the text where it is none of them."""
    with suppress(*PARSER_FAULTS):
        try:
            value = json.loads(text)
        except ValueError:
            is_bare = quote and text[:1] in ("{", "[")
            value = json.loads(_bare(text, quote)) if is_bare else ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)  # else it is no JSON
        if isinstance(value, float) and value.is_integer() and "integer" in kinds:
            value = int(value)
        kind = _KINDS.get(type(value), "array")
        fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
        if fits or "string" not in kinds:
            return value
    return regex.sub(r"^(['\"])(.*)\1$", r"\2", text, flags=regex.DOTALL)  # unescaped, as LFM2's


def _bare(text: str, quote: str) -> str:
    """JSON of an object whose keys have no quotes, and whose strings have others."""
    key, pieces = r'([{,]\s*)([^\s{}\[\],:"]+)(?=\s*:)', enumerate(text.split(quote))
    return "".join(json.dumps(p) if i % 2 else regex.sub(key, r'\1"\2"', p) for i, p in pieces)


def kinds_of(schema: Any, root: Json) -> set[str]:
    """The types that a schema allows, empty where it may be any."""
    found: set[str] = set()
    rest, seen = [schema], set()
    while rest:
        one = resolved(rest.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        values = one.get("enum", [one["const"]] if "const" in one else [])
        given = one.get("type") or [_KINDS.get(type(each), "object") for each in values]
        kinds = {given} if isinstance(given, str) else {*given}
        more = [each for key in ("anyOf", "oneOf") for each in one.get(key) or ()]
        if not kinds and not more:
            return set()
        found |= kinds
        rest += more
    return found


def resolved(schema: Any, root: Json) -> Json:
    """What a schema refers to; nothing where it is no object."""
    for _ in range(8):
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(path, str):
            return schema if isinstance(schema, dict) else {}
        schema = root
        for name in path.removeprefix("#/").split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return {}


def whole_call(name: Any, arguments: Any, required: Iterable[str], identity: str = "") -> Part:
    """A call whose arguments are known; one of PARSER_FAULTS where they are no object or lack."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, dict) or {*required} - given.keys():
        raise ValueError("no call of a function with arguments by name")
    text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    return Part(CALL, text, name, identity or f"call_{uuid.uuid4().hex[:24]}")
