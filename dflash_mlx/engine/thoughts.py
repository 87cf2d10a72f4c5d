"""Which tokens of an answer are thoughts, and a limit on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_mlx.engine.delta import BEGIN, END

_WORDS, _THOUGHT, _CALL = "words", "thought", "call"
_LONGEST = 32  # tokens that a mark is made of, at most


@dataclass(frozen=True)
class Thoughts:
    """What an answer has of thoughts, up to one of its tokens."""

    kind: str = _WORDS  # of what the next token is a part of
    tokens: int = 0  # of all thoughts, without the marks around them
    recent: tuple[str, ...] = ()  # the texts of the last tokens behind the last mark

    @classmethod
    def begun(cls, in_thought: bool) -> Thoughts:
        """Before the first token; the prompt may have opened a thought."""
        return cls(_THOUGHT if in_thought else _WORDS)

    @property
    def in_thought(self) -> bool:
        return self.kind == _THOUGHT

    def after(self, token: int, tokenizer: Any) -> Thoughts:
        """The thoughts of the answer with another token. In a call of a tool, marks are text."""
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        marks = {_WORDS: {BEGIN: _THOUGHT, start: _CALL}, _THOUGHT: {END: _WORDS}}
        own = marks.get(self.kind, {end: _WORDS})
        recent = (*self.recent, tokenizer.decode([token]))[-_LONGEST:]
        mark = next((each for each in own if each and each in "".join(recent)), None)
        if mark is None:
            return Thoughts(self.kind, self.tokens + self.in_thought, recent)
        before = next(n for n in range(_LONGEST) if mark in "".join(recent[-n - 1 :]))
        return Thoughts(own[mark], self.tokens - before * self.in_thought)


class ThoughtLimit:
    """Lets an answer think so many tokens; then only the mark that ends a thought may follow.

    For a `Constraint`, in the place of an LLMatcher of llguidance.
    """

    def __init__(self, tokenizer: Any, most: int, in_thought: bool) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._end: list[int] = tokenizer.encode(END, add_special_tokens=False)
        self._tokens: list[int] = []
        self._read = [Thoughts.begun(in_thought)]  # up to each of them

    def compute_ff_tokens(self) -> list[int]:
        """What is left of the mark, where it has to follow."""
        if not self._read[-1].in_thought or self._read[-1].tokens < self._most:
            return []
        ends = (n for n in range(len(self._end) - 1, 0, -1) if self._tokens[-n:] == self._end[:n])
        return self._end[next(ends, 0) :]

    def compute_bitmask(self) -> bytes:
        """A bit for each token up to the one that may follow; none where all may."""
        if not (forced := self.compute_ff_tokens()):
            return b""
        return np.packbits(np.arange(forced[0] + 1) == forced[0], bitorder="little").tobytes()

    def try_consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Take in a token, if it may follow."""
        return self._take(tokens) == len(tokens)

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        """How many may follow, one after the other."""
        fit = self._take(tokens)
        self.rollback(fit)
        return fit

    def rollback(self, tokens: int) -> None:
        """Forget the last tokens."""
        length = len(self._tokens) - tokens
        del self._tokens[length:], self._read[length + 1 :]

    def _take(self, tokens: Sequence[int]) -> int:
        """Take in tokens up to the first that may not follow; how many these are."""
        for i, token in enumerate(tokens):
            if self.compute_ff_tokens()[:1] not in ([], [token]):
                return i
            self._tokens.append(token)
            self._read.append(self._read[-1].after(token, self._tokenizer))
        return len(tokens)

    def is_stopped(self) -> bool:
        """An answer may always go on."""
        return False

    is_error = is_stopped
