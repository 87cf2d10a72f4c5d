"""The text of an answer in its parts, as it streams: thoughts, words and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_mlx.session.text import ThinkingReader, begun

PARSER_FAULTS = (ValueError, LookupError, SyntaxError, TypeError, AttributeError, RecursionError)


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
        self._thinking = ThinkingReader(in_thought)
        self._tools, self._one_call = list(tools), one_call
        self._start: str = tokenizer.tool_call_start if tools else ""
        self._end: str = tokenizer.tool_call_end if tools else ""
        self._parse = tokenizer.tool_parser if tools else None
        self._held, self._in_call = "", False
        self._thought, self._said = False, False

    def feed(self, text: str) -> list[Part]:
        """What is certain by now."""
        if self.is_over:
            return []
        split = self._thinking.feed(text)
        return [*self._thoughts(split.thought), *self._words(split.answer)]

    def finish(self) -> list[Part]:
        """What was held back; a call that was cut off is words."""
        if self.is_over:
            return []
        split = self._thinking.finish()
        parts = [*self._thoughts(split.thought), *self._words(split.answer)]
        held, self._held = self._held, ""
        if self._in_call:
            parts += self._calls(held, self._start + held)
        elif held:
            parts += self._plain(held)
        return parts

    def _thoughts(self, text: str) -> Iterator[Part]:
        text = text if self._thought else text.lstrip("\n")
        if text:
            self._thought = True
            yield Thought(text)

    def _words(self, text: str) -> Iterator[Part]:
        self._held += text
        while self._start and self._held and not self.is_over:
            if self._in_call:
                inside, found, after = self._held.partition(self._end) if self._end else ("",) * 3
                if not found:
                    return
                self._held, self._in_call = after, False
                yield from self._calls(inside, self._start + inside + self._end)
            else:
                before, found, after = self._held.partition(self._start)
                certain = before if found else before[: len(before) - begun(before, (self._start,))]
                yield from self._plain(certain)
                self._held = after if found else self._held[len(certain) :]
                self._in_call = bool(found)
                if not found:
                    return
        if not self._start:
            held, self._held = self._held, ""
            yield from self._plain(held)

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


def _call(parsed: Mapping[str, Any]) -> Call:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call of a function with arguments by name")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return Call(f"call_{uuid.uuid4().hex[:24]}", name, text)
