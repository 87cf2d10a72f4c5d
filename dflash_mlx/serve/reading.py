"""The text of an answer in its parts, as it streams: thoughts, words and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.engine.delta import BEGIN, END, begun
from dflash_mlx.engine.thoughts import Thoughts

WORDS, THOUGHT, CALL = "words", "thought", "call"
PARSER_FAULTS = (ValueError, LookupError, SyntaxError, TypeError, AttributeError, RecursionError)
# How a call begins whose arguments can be told as they are made.
_OPENING = re.compile(r'\s*\{"name":\s*"([^"\\]+)",\s*"(?:arguments|parameters)":\s*(?=\{)')
_ESCAPED = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """Some of an answer: a few of its words, some of a thought, a tool call or some of one."""

    kind: str  # WORDS, THOUGHT or CALL
    text: str  # of a call its arguments, a JSON object; of a part of a call some of that
    name: str = ""  # of the tool that is called
    identity: str = ""  # of the call, which all of its parts share


@dataclass
class _Begun:
    """A call whose arguments are told as they are made."""

    name: str
    identity: str
    at: int  # characters of the call that are told, or are no arguments
    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False
    is_whole: bool = False

    def take(self, call: str) -> str:
        """What the call has of its arguments by now, beyond what was taken before."""
        begin = self.at
        while self.at < len(call) and not self.is_whole:
            character = call[self.at]
            if self.in_string:
                self.in_string = self.is_escaped or character != '"'
                self.is_escaped = not self.is_escaped and character == "\\"
            elif character == '"':
                self.in_string = True
            else:
                self.depth += (character in "{[") - (character in "}]")
                self.is_whole = self.depth == 0
            self.at += 1
        return call[begin : self.at]


class AnswerReader:
    """Reads one answer."""

    def __init__(
        self,
        tokenizer: Any = None,  # without one everything is words
        tools: Sequence[Mapping[str, Any]] = (),  # without any, nothing is a call
        in_thought: bool = False,  # the chat template opened a thought
        one_call: bool = False,  # the answer is over with its first call
        streams: bool = False,  # arguments are told as they are made, not whole and checked
    ) -> None:
        self.called = False  # there was a call
        self.is_over = False  # nothing more is read
        self._tokenizer, self.thoughts = tokenizer, Thoughts.begun(in_thought)
        self._tools, self._one_call = list(tools), one_call
        self._early = {tool["function"]["name"] for tool in tools} if streams else set()
        self._begun: _Begun | None = None
        self._start: str = tokenizer.tool_call_start if tools else ""
        self._end: str = tokenizer.tool_call_end if tools else ""
        self._parse = tokenizer.tool_parser if tools else None
        starts = {BEGIN: THOUGHT, **({self._start: CALL} if self._start else {})}
        # What is read now, and by what is being read the marks that end it and what they begin.
        self._kind = THOUGHT if in_thought else WORDS
        self._marks = {WORDS: {} if tokenizer is None else starts, THOUGHT: {END: WORDS}}
        self._held = ""  # text of which it is not certain what it is
        self._looked = 0  # characters of a call that its end does not begin with
        self._last = ""  # the kind of the last part

    def feed(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """What is certain by now; among these tokens those of thoughts are counted."""
        for token in tokens if self._tokenizer is not None else ():
            self.thoughts = self.thoughts.after(token, self._tokenizer)
        self._held += text
        return [*self._read()]

    def finish(self, cut: bool = False) -> list[Part]:
        """What was held back; half a call is words, and nothing where a limit has cut it."""
        parts = [*self._read(finished=True)]
        if self.is_over:
            return parts
        held, self._held = self._held, ""
        if self._kind == CALL:
            self._kind = WORDS
            return [*parts, *self._calls(held, "" if cut else self._start + held)]
        if cut and len(held) > 1 and self._start.startswith(held):
            return parts
        return [*parts, *self._told(held)]

    def _read(self, finished: bool = False) -> Iterator[Part]:
        """Take what is certain from what is held, up to the next mark and beyond."""
        while not self.is_over:
            if self._kind == CALL:
                at = self._end_of_call()
                if at < 0 and finished and self._end:  # of a string that has no end
                    at = self._held.find(self._end)
                if at < 0:
                    yield from self._arguments(self._held[: self._certain()])
                    return
                inside, self._held = self._held[:at], self._held[at + len(self._end) :]
                yield from self._arguments(inside)
                self._kind, self._looked = WORDS, 0
                yield from self._calls(inside, self._start + inside + self._end)
                continue
            marks = self._marks[self._kind]
            places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            at, mark = min(places, default=(-1, ""))
            certain = at if mark else len(self._held) - begun(self._held, tuple(marks))
            text, self._held = self._held[:certain], self._held[certain + len(mark) :]
            yield from self._told(text)
            if not mark:
                return
            self._kind = marks[mark]

    def _end_of_call(self) -> int:
        """Where its last tag begins, -1 where that did not come; in a JSON string it is text.

        A string has no raw line break: where one follows before the next quote, it had no end.
        """
        while self._end and (at := self._held.find(self._end, self._looked)) >= 0:
            if not _in_string(self._held[:at]):
                return at
            string, quote, _ = self._held[at + len(self._end) :].partition('"')
            if "\n" in string:
                return at
            if not quote:
                break
            self._looked = at + 1
        return -1

    def _certain(self) -> int:
        """Characters of an unfinished call that are no part of its last tag."""
        if self._end and (at := self._held.find(self._end, self._looked)) >= 0:
            return at
        return len(self._held) - (begun(self._held, (self._end,)) if self._end else 0)

    def _arguments(self, call: str) -> Iterator[Part]:
        """The arguments that a call has by now, where its beginning says what it will be."""
        if self._begun is None:
            opening = _OPENING.match(call) if self._early else None
            if opening is None or opening[1] not in self._early:
                return
            self._begun = _Begun(opening[1], _identity(), opening.end())
            self.called, self._last = True, CALL
        if text := self._begun.take(call):
            yield Part(CALL, text, self._begun.name, self._begun.identity)

    def _told(self, text: str) -> Iterator[Part]:
        """Words or some of a thought; line breaks between parts of two kinds are neither."""
        begins = self._last != self._kind and (self._last or self._kind == THOUGHT)
        if text := text.lstrip("\n") if begins else text:
            self._last = self._kind
            yield Part(self._kind, text)

    def _calls(self, inside: str, whole: str) -> Iterator[Part]:
        """The calls that a text is, or the text where it is none; nothing where it was told."""
        if self._begun is not None:
            self._begun, self.is_over = None, self._one_call
            return
        try:
            found = self._parse(inside, self._tools) if self._parse is not None else []
            calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
        except PARSER_FAULTS:  # of mlx-lm's parsers, for what is no call
            yield from self._told(whole)
            return
        for call in calls[:1] if self._one_call else calls:
            self.called, self._last = True, CALL
            yield call
        self.is_over = self._one_call


def _in_string(text: str) -> bool:
    """Whether a JSON object that begins so is in the middle of a string."""
    return text.lstrip().startswith("{") and _ESCAPED.sub("", text).count('"') % 2 == 1


def _call(parsed: Mapping[str, Any]) -> Part:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call of a function with arguments by name")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return Part(CALL, text, name, _identity())


def _identity() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
