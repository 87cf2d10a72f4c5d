"""One answer in the making: rounds become deltas with their text, reason and statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.step import Round
from dflash_mlx.session.text import StopText
from dflash_mlx.verifier.model import Target


@dataclass(frozen=True)
class TextDelta:
    """What one round added to the answer.

    text: may be empty while a character or a stop text is incomplete. tokens: a stop token
    included. accepted: the round's tree and path. finish_reason: None until the last delta, then
    "stop" (stop token or text, or the end of the grammar), "length" (max_tokens) or "context" (the
    model's context is full).
    statistics: of the answer so far; one object that goes on counting. anchor: the token before
    `tokens`, for which the tree's root stands. proposal: why that tree was chosen.
    """

    text: str
    tokens: tuple[int, ...]
    accepted: Accepted
    finish_reason: str | None
    statistics: Statistics
    anchor: int
    proposal: Proposal


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    statistics: Statistics


class Answering:
    """Takes the rounds of one answer, from the token after the prompt on.

    config: how it was asked for, with a seed where it is drawn. statistics: of the answer so far.
    reason: as of `TextDelta`. The clock runs from here on, and stands between a delta and `resume`.
    """

    def __init__(
        self, pair: Pair, config: DecodeConfig, method: str, prompt: Sequence[int]
    ) -> None:
        self.config = config
        self.statistics = Statistics(method, prompt_tokens=len(prompt))
        self.reason: str | None = None
        self._text = StopText(pair.tokenizer, config.stop)
        self._room = pair.target.context_length - len(prompt)
        self._anchor, self._ended = prompt[-1], False
        self._plain_seconds = 0.0  # of the last round that knew
        self._begin = self._resumed = time.perf_counter()

    def end_prompt(self, reused: int) -> None:
        """The prompt is read, but for `reused` tokens that the caches held."""
        self.statistics.reused_tokens = reused
        self.resume()
        self.statistics.prefill_seconds = self._resumed - self._begin

    def resume(self) -> None:
        """Whoever reads the answer asks for more."""
        self._resumed = time.perf_counter()

    def take(self, round_: Round) -> TextDelta:
        """What a round adds; tokens behind a stop are left out."""
        accepted, proposal = round_.accepted, replace(round_.proposal, q=None)  # it is large
        statistics, anchor = self.statistics, self._anchor
        kept = self._text.take(accepted.tokens)
        self._ended = accepted.ends and kept == accepted.tokens
        self._plain_seconds = proposal.plain_seconds or self._plain_seconds
        statistics.plain_seconds += len(kept) * self._plain_seconds
        if statistics.generated_tokens:
            statistics.add_round(accepted, proposal.mode)
        else:  # from the prompt's own pass
            statistics.near_ties = accepted.near_ties
            statistics.time_to_first_token = time.perf_counter() - self._begin
        statistics.generated_tokens += len(kept)
        self._anchor, self.reason = kept[-1], self._reason()
        piece = self._text.read(self.reason is not None)
        statistics.decode_seconds += time.perf_counter() - self._resumed
        return TextDelta(piece, kept, accepted, self.reason, statistics, anchor, proposal)

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the answer; None where it was none of them."""
        return self._text.found

    @property
    def is_unread(self) -> bool:
        """Whether the prompt is not read whole yet."""
        return not self.statistics.generated_tokens

    @property
    def length(self) -> int:
        """Tokens of the conversation, the answer included."""
        return self.statistics.prompt_tokens + self.statistics.generated_tokens

    def _reason(self) -> str | None:
        said = self.statistics.generated_tokens
        if self._text.stopped or self._ended:
            return "stop"
        if said >= self.config.max_tokens:
            return "length"
        return "context" if said >= self._room else None


def check_length(target: Target, prompt: Sequence[int]) -> None:
    """Raise DFlashError for a prompt that is empty or leaves no room for an answer."""
    limit = target.context_length
    if not prompt:
        raise DFlashError("the prompt is empty", "give at least one token")
    if len(prompt) >= limit:
        raise DFlashError(
            f"the prompt has {len(prompt)} tokens, but {target.name} can hold "
            f"{limit} with the answer",
            "shorten the prompt or begin a new conversation",
        )


def collect(deltas: Iterator[TextDelta]) -> Answer:
    """Run a stream to its end."""
    texts: list[str] = []
    tokens: list[int] = []
    for delta in deltas:
        texts.append(delta.text)
        tokens.extend(delta.tokens)
    return Answer("".join(texts), tuple(tokens), delta.finish_reason or "", delta.statistics)
