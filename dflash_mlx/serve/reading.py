"""The text of an answer in its parts, as it streams: thoughts, words and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_mlx.engine.text import BEGIN, END, begun

PARSER_FAULTS = (ValueError, LookupError, SyntaxError, TypeError, AttributeError, RecursionError)
_ESCAPED = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True)
class Thought:
    """Some of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Said:
    """Some of the answer's words."""

    text: str


@dataclass(frozen=True)
class Call:
    """A whole tool call; `arguments` is a JSON object as text."""

    identity: str
    name: str
    arguments: str


Part = Thought | Said | Call


class Reader(Protocol):
    """Reads one answer; `is_over` says that nothing more is read."""

    @property
    def called(self) -> bool:
        """Whether there was a tool call."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is read."""

    def feed(self, text: str) -> list[Part]:
        """What is certain by now."""

    def finish(self) -> list[Part]:
        """What was held back."""


class TextReader:
    """Takes every text for words."""

    called = is_over = False

    def feed(self, text: str) -> list[Part]:
        """All of it."""
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing is held back."""
        return []


class AnswerReader:
    """Reads one answer.

    tools: that the model was told of; without any, no call is looked for. in_thought: whether the
    template opened a thought. one_call: whether the answer is over with its first call.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        in_thought: bool = False,
        one_call: bool = False,
    ) -> None:
        self.called = False
        self.is_over = False
        self._tools, self._one_call = list(tools), one_call
        self._start: str = tokenizer.tool_call_start if tools else ""
        self._end: str = tokenizer.tool_call_end if tools else ""
        self._parse = tokenizer.tool_parser if tools else None
        self._held, self._in_call, self._in_thought = "", False, in_thought
        self._thought, self._said = False, False
        self._looked = 0  # characters of a call that its end does not begin with

    def feed(self, text: str) -> list[Part]:
        """What is certain by now."""
        self._held += text
        return [*self._read()]

    def finish(self) -> list[Part]:
        """What was held back; a call that was cut off is words."""
        if self.is_over:
            return []
        parts = [*self._read(finished=True)]
        if self.is_over:
            return parts
        held, self._held = self._held, ""
        if self._in_call:
            return [*parts, *self._calls(held, self._start + held)]
        return [*parts, *self._told(held)]

    def _read(self, finished: bool = False) -> Iterator[Part]:
        """Take what is certain from what is held, up to the next mark and beyond."""
        while not self.is_over:
            if self._in_call:
                at = self._end_of_call()
                if at < 0 and finished and self._end:  # of a string that has no end
                    at = self._held.find(self._end)
                if at < 0:
                    return
                inside, self._held = self._held[:at], self._held[at + len(self._end) :]
                self._in_call, self._looked = False, 0
                yield from self._calls(inside, self._start + inside + self._end)
                continue
            marks = (END,) if self._in_thought else tuple(filter(None, (BEGIN, self._start)))
            places = [(self._held.find(mark), mark) for mark in marks]
            at, mark = min((place for place in places if place[0] >= 0), default=(-1, ""))
            certain = at if mark else len(self._held) - begun(self._held, marks)
            text, self._held = self._held[:certain], self._held[certain + len(mark) :]
            yield from self._told(text)
            if not mark:
                return
            self._in_thought, self._in_call = mark == BEGIN, mark == self._start

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

    def _told(self, text: str) -> Iterator[Part]:
        return self._thoughts(text) if self._in_thought else self._plain(text)

    def _thoughts(self, text: str) -> Iterator[Part]:
        text = text if self._thought else text.lstrip("\n")
        if text:
            self._thought = True
            yield Thought(text)

    def _plain(self, text: str) -> Iterator[Part]:
        """Words; line breaks between a thought or a call and the words behind it are neither."""
        if not self._said and (self._thought or self.called):
            text = text.lstrip("\n")
        if text:
            self._said = True
            yield Said(text)

    def _calls(self, inside: str, whole: str) -> Iterator[Part]:
        """The calls that a text is, or the text where it is none."""
        try:
            found = self._parse(inside, self._tools) if self._parse is not None else []
            calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
        except PARSER_FAULTS:  # of mlx-lm's parsers, for what is no call
            yield from self._plain(whole)
            return
        for call in calls[:1] if self._one_call else calls:
            self.called, self._said = True, False
            yield call
        self.is_over = self._one_call


def _in_string(text: str) -> bool:
    """Whether a JSON object that begins so is in the middle of a string."""
    return text.lstrip().startswith("{") and _ESCAPED.sub("", text).count('"') % 2 == 1


def _call(parsed: Mapping[str, Any]) -> Call:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call of a function with arguments by name")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return Call(f"call_{uuid.uuid4().hex[:24]}", name, text)
