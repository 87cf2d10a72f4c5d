"""What is kept for evaluation, and whether a prompt comes too near to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prompts.programming import SENTENCE

PHRASE = 8  # words in a row


@dataclass(frozen=True)
class Evaluation:
    """Names of functions and phrases of evaluation texts.

    Texts meet where they define a function of the same name or share a phrase; the sentence that
    all programming tasks begin with does not count. The same task in other words is not found.
    """

    names: frozenset[str]
    phrases: frozenset[tuple[str, ...]]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Evaluation:
        """All names and phrases of `texts`."""
        texts = list(texts)
        return cls(
            frozenset(name for text in texts for name in _names(text)),
            frozenset(phrase for text in texts for phrase in _phrases(text)),
        )

    def meets(self, text: str) -> bool:
        """Whether `text` has a name or phrase of these."""
        return not (self.names.isdisjoint(_names(text)) and self.phrases.isdisjoint(_phrases(text)))


def _names(text: str) -> set[str]:
    return set(re.findall(r"\bdef\s+(\w+)", text))


def _phrases(text: str) -> set[tuple[str, ...]]:
    """All runs of PHRASE words, or the whole text where it is shorter."""
    words = re.findall(r"\w+", text.replace(SENTENCE, " ").lower())
    last = max(len(words) - PHRASE, 0)
    return {tuple(words[i : i + PHRASE]) for i in range(last + 1)} if words else set()
