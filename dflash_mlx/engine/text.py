"""Tokens to text as it streams: stop tokens and stop texts, and `<think>...</think>` split off.

By text, not by tokens as mlx-lm's matchers do: a tokenizer may join the end of a stop text with
what follows, and the tokens of an answer are cut at the one that completes a stop text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<think>", "</think>"
_TAIL = 8  # tokens at the end of a prompt in which a template may open a thought


class StopText:
    """Turns tokens into text and cuts it where plain decoding would stop.

    Stop tokens end the answer and are not part of its text. A stop text is cut off together with
    all that follows; text that may be the beginning of one is held back.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.stopped = False
        self.found: str | None = None  # the stop text that ended the answer
        self._stop_ids = tokenizer.eos_token_ids
        self._stops = tuple(stops)
        self._detokenizer = tokenizer.detokenizer
        self._sent = 0
        self._cut: int | None = None

    def take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Read the tokens of a round; return those up to the one that ends the answer."""
        for i, token in enumerate(tokens):
            if token in self._stop_ids:
                self.stopped = True
            else:
                self._detokenizer.add_token(token)
                self._find_stop_text()
            if self.stopped:
                return tuple(tokens[: i + 1])
        return tuple(tokens)

    def read(self, finished: bool) -> str:
        """The text that became certain since the last call; all of it when `finished`."""
        if finished:
            self._detokenizer.finalize()
            self._find_stop_text()
        text = self._detokenizer.text
        end = len(text) if finished else len(text) - begun(text, self._stops)
        end = min(end, self._cut) if self._cut is not None else end
        begin, self._sent = self._sent, max(self._sent, end)
        return str(text[begin:end])

    def _find_stop_text(self) -> None:
        # Read after every token: mlx-lm's detokenizer loses an incomplete character behind a
        # newline when both arrive between two reads.
        text = self._detokenizer.text
        # What was sent was searched before; a stop text may still begin inside what was held.
        places = [(text.find(stop, max(0, self._sent - len(stop))), stop) for stop in self._stops]
        found = [place for place in places if place[0] >= 0]
        if found and self._cut is None:
            (self._cut, self.found), self.stopped = min(found), True


@dataclass(frozen=True)
class SplitText:
    """A text in two parts: thought and answer."""

    thought: str = ""
    answer: str = ""

    def __add__(self, other: SplitText) -> SplitText:
        return SplitText(self.thought + other.thought, self.answer + other.answer)


class ThinkingReader:
    """Splits text as it streams; a tag may arrive in pieces."""

    def __init__(self, inside: bool = False) -> None:
        self.inside = inside  # a thought, which may have been opened before the text
        self._held = ""

    def feed(self, text: str) -> SplitText:
        """The parts of `text` that are certain by now."""
        parts, self._held = SplitText(), self._held + text
        while True:
            tag = END if self.inside else BEGIN
            before, found, after = self._held.partition(tag)
            certain = before if found else before[: len(before) - begun(before, (tag,))]
            parts += self._part(certain)
            if not found:
                self._held = self._held[len(certain) :]
                return parts
            self._held, self.inside = after, not self.inside

    def finish(self) -> SplitText:
        held, self._held = self._held, ""
        return self._part(held)

    def _part(self, text: str) -> SplitText:
        return SplitText(thought=text) if self.inside else SplitText(answer=text)


def split_thinking(text: str) -> SplitText:
    """Thought and answer of a finished text; an unopened `</think>` closes a thought too."""
    closes_first = END in text and BEGIN not in text.partition(END)[0]
    reader = ThinkingReader(inside=closes_first)
    return reader.feed(text) + reader.finish()


def opens_thought(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether `prompt` ends inside a thought, as some chat templates have it."""
    return bool(tokenizer.decode(list(prompt[-_TAIL:])).rstrip().endswith(BEGIN))


def begun(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=1) - 1
    for n in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-n:]) for mark in marks):
            return n
    return 0
