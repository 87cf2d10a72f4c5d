"""Separating a model's thoughts, `<think>...</think>`, from what it says."""

from __future__ import annotations

from dataclasses import dataclass

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True)
class Split:
    """A text in two parts: thought and answer."""

    thought: str = ""
    answer: str = ""

    def __add__(self, other: Split) -> Split:
        return Split(self.thought + other.thought, self.answer + other.answer)


class ThinkingReader:
    """Splits text as it streams; a tag may arrive in pieces.

    inside: whether the prompt itself opened the thought, as some chat templates do.
    """

    def __init__(self, inside: bool = False) -> None:
        self.inside = inside
        self._held = ""

    def feed(self, text: str) -> Split:
        """The parts of `text` that are certain by now."""
        thought, answer = "", ""
        self._held += text
        while True:
            tag = END if self.inside else BEGIN
            before, found, after = self._held.partition(tag)
            certain = before if found else before[: len(before) - _tag_begun(before, tag)]
            if self.inside:
                thought += certain
            else:
                answer += certain
            if not found:
                self._held = self._held[len(certain) :]
                return Split(thought, answer)
            self._held, self.inside = after, not self.inside

    def finish(self) -> Split:
        """What was held back because it might have become a tag."""
        held, self._held = self._held, ""
        return Split(held, "") if self.inside else Split("", held)


def _tag_begun(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of `tag`."""
    for n in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-n:]):
            return n
    return 0


def split_thinking(text: str) -> Split:
    """Thought and answer of a finished text; an unopened `</think>` closes a thought too."""
    closes_first = END in text and BEGIN not in text.partition(END)[0]
    reader = ThinkingReader(inside=closes_first)
    return reader.feed(text) + reader.finish()
