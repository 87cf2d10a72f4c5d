"""What clients get of an answer: deltas as they come, the whole of it, and the text of its tokens.

Stops are found by text, not by tokens as mlx-lm's matchers do: a tokenizer may join the end of a
stop text with what follows, and the tokens of an answer are cut at the one that completes it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import Accepted
from dflash_mlx.engine.drafter import Proposal

BEGIN, END = "<think>", "</think>"
_TAIL = 8  # tokens at the end of a prompt in which a template may open a thought
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token that is one, as sentencepiece writes it
LEAST = -9999.0  # in place of minus infinity, which JSON does not know


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target itself said of a token, before temperature, filters and penalties."""

    token: int
    logprob: float | None  # natural; None for the first token of a prompt
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs


@dataclass(frozen=True)
class Delta:
    """What one round added to an answer."""

    text: str  # may be empty while a character or a stop text is incomplete
    tokens: tuple[int, ...]  # a stop token included
    accepted: Accepted  # the round's tree and path
    # None until the last delta, then "stop" (a stop token or text, or the end of the grammar),
    # "length" (max_tokens) or "context" (the model's context is full).
    finish_reason: str | None
    statistics: Statistics  # of the answer so far; one object that goes on counting
    anchor: int  # the token before `tokens`, for which the tree's root stands
    proposal: Proposal  # says why that tree was chosen
    stop_text: str | None = None  # the one that ended the answer
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `tokens`, where a request asked for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's, with the first delta


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    statistics: Statistics


def collect(deltas: Iterator[Delta]) -> Answer:
    """Run a stream to its end."""
    texts: list[str] = []
    tokens: list[int] = []
    for delta in deltas:
        texts.append(delta.text)
        tokens.extend(delta.tokens)
    return Answer("".join(texts), tuple(tokens), delta.finish_reason or "", delta.statistics)


def logprobs_of(
    tokens: Sequence[int], logits: mx.array | None, most: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens, and the `most` likeliest, from logits [n, V]; () without any."""
    if logits is None or not tokens:
        return ()
    rows = logits[: len(tokens)].astype(mx.float32)
    logprobs = mx.maximum(rows - mx.logsumexp(rows, axis=-1, keepdims=True), LEAST)
    own = mx.take_along_axis(logprobs, mx.array([*tokens])[:, None], axis=-1)[:, 0]
    best = theirs = mx.zeros((len(rows), 0))
    if most := min(most, logprobs.shape[-1]):  # sorting all of a vocabulary takes ten times as long
        best = mx.argmax(logprobs, axis=-1, keepdims=True)
        if most > 1:
            best = mx.sort(mx.argpartition(-logprobs, most - 1, axis=-1)[:, :most], axis=-1)
        order = mx.argsort(-mx.take_along_axis(logprobs, best, axis=-1), axis=-1)
        best = mx.take_along_axis(best, order, axis=-1)
        theirs = mx.take_along_axis(logprobs, best, axis=-1)
    mx.eval(own, best, theirs)
    told: list[Any] = [own.tolist(), best.tolist(), theirs.tolist()]
    found = zip(tokens, *told, strict=True)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in found
    )


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token adds to a text, in UTF-8; it may be a part of a character."""
    text, piece = str(tokenizer.decode([token])), str(tokenizer.convert_ids_to_tokens(token))
    if "\ufffd" in text:
        from transformers.convert_slow_tokenizer import bytes_to_unicode  # takes seconds

        if found := _BYTE.fullmatch(piece):
            return bytes.fromhex(found[1])
        of_character = {each: byte for byte, each in bytes_to_unicode().items()}
        if of_character.keys() >= {*piece}:
            return bytes(of_character[each] for each in piece)
    elif piece.startswith("▁") and not text.startswith(" "):  # cut off at the beginning of a text
        text = " " + text
    return text.encode("utf-8", "backslashreplace")


class StopText:
    """Turns tokens into text and cuts it where plain decoding would stop.

    Stop tokens end the answer and are not part of its text. A stop text is cut off together with
    all that follows; text that may be the beginning of one is held back.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        ends: Collection[int],  # tokens that end the answer
        least: int = 0,  # tokens before which no text ends it
    ) -> None:
        self.stopped = False
        self.found: str | None = None  # the stop text that ended the answer
        self._ends, self._untold = ends, {*ends, *tokenizer.eos_token_ids}
        self._early = least  # tokens to come in which a stop text may end without ending the answer
        self._floor = 0  # the first end, in characters, of one that does
        self._stops = tuple(stops)
        self._detokenizer = tokenizer.detokenizer
        self._sent = 0
        self._cut: int | None = None

    def take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Read the tokens of a round; return those up to the one that ends the answer."""
        for i, token in enumerate(tokens):
            self._early -= 1
            if token not in self._untold:
                self._detokenizer.add_token(token)
                self._find_stop_text()
            if self.stopped or token in self._ends:
                self.stopped = True
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
        if self._early >= 0:
            self._floor = len(text) + 1
            return
        # What was sent was searched before; a stop text may still begin inside what was held.
        begin = max(self._sent, self._floor)
        places = [(text.find(stop, max(0, begin - len(stop))), stop) for stop in self._stops]
        found = [place for place in places if place[0] >= 0]
        if found and self._cut is None:
            (self._cut, self.found), self.stopped = min(found), True


@dataclass(frozen=True)
class SplitText:
    """A text in two parts: thought and answer."""

    thought: str = ""
    answer: str = ""


def split_thinking(text: str, inside: bool | None = None, ended: bool = True) -> SplitText:
    """The thoughts and the answer in a text.

    inside: it begins in a thought; None where an unopened `</think>` says so. ended: it grows no
    more, so that its end cannot become a tag.
    """
    if inside is None:
        inside = END in text and BEGIN not in text.partition(END)[0]
    parts: dict[bool, list[str]] = {True: [], False: []}
    while text:
        tag = END if inside else BEGIN
        part, found, text = text.partition(tag)
        certain = part if found or ended else part[: len(part) - begun(part, (tag,))]
        parts[inside].append(certain)
        inside = not inside
    return SplitText("".join(parts[True]), "".join(parts[False]))


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
