"""One conversation: answers as they are decoded, with caches that later turns reuse."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.drafters.methods import make_drafter, settle
from dflash_mlx.engine.decode import decode, prefill
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.exact import noise_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.state import State
from dflash_mlx.session.templates import Prompt, prompt_tokens
from dflash_mlx.session.text import StopText


@dataclass(frozen=True)
class TextDelta:
    """What one round added to the answer.

    text: may be empty while a character or a stop text is incomplete. tokens: a stop token
    included. accepted: the round's tree and path. finish_reason: None until the last delta, then
    "stop" (stop token or text), "length" (max_tokens) or "context" (the model's context is full).
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


class Session:
    """One conversation with one pair: turns reuse the caches of the turns before.

    config: settings of every turn, with a method in place of `auto` once it is made. prefixes:
    where turns find and leave their caches; without any, the last turn's are kept. Raises
    DFlashError where the method does not fit the pair.
    """

    def __init__(
        self, pair: Pair, config: DecodeConfig | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        self.pair = pair
        self.prefixes = prefixes or PrefixCache()
        self.config = settle(config or DecodeConfig(), pair.means)
        self.drafter = make_drafter(pair, self.config)
        if self.config.guarded:
            noise_of(pair.target)  # now, not in the time of the first answer
        self.state = self._empty()

    def stream(
        self, tokens: Sequence[int], observer: Observer | None = None
    ) -> Iterator[TextDelta]:
        """Answer the prompt `tokens`: the whole conversation so far, one delta per round.

        What the caches hold of it is not computed again. The caller may stop at any time and call
        again. Raises DFlashError when the prompt is empty or does not fit the context.
        """
        prompt = list(tokens)
        self.check(prompt)
        return self._whole_or_nothing(self._answer(prompt, observer or Observer()))

    def _whole_or_nothing(self, deltas: Iterator[TextDelta]) -> Iterator[TextDelta]:
        """Start over with empty caches where a round broke off, as with an interrupt inside it."""
        try:
            yield from deltas
        except GeneratorExit:  # the caller has stopped between two rounds
            raise
        except BaseException:
            self.state = self._empty()
            raise
        finally:
            if not self.config.guarded:
                self.prefixes.put(self.state, self.pair.target, self.drafter)

    def _empty(self) -> State:
        return State(self.pair.target.new_cache(), self.drafter.new_context())

    def _begin(self, prompt: list[int]) -> State:
        """Where the answer to a prompt begins."""
        if self.config.guarded:
            return (
                self._empty()
            )  # rows that passes over several rows have written are not plain ones
        return self.prefixes.take(prompt, self.pair.target, self.drafter)

    def _answer(self, prompt: list[int], observer: Observer) -> Iterator[TextDelta]:
        statistics = Statistics(self.drafter.name, prompt_tokens=len(prompt))
        text = StopText(self.pair.tokenizer, self.config.stop)
        begin = time.perf_counter()
        target, state = self.pair.target, self._begin(prompt)
        self.state = state
        statistics.reused_tokens = prefill(
            target, self.drafter, state, prompt, self.config, observer
        )
        statistics.prefill_seconds = time.perf_counter() - begin
        anchor, resumed = prompt[-1], time.perf_counter()
        for round_ in decode(target, self.drafter, state, self.config, observer):
            accepted, proposal = round_.accepted, replace(round_.proposal, q=None)  # it is large
            kept = text.take(accepted.tokens)
            statistics.plain_seconds += len(kept) * (proposal.plain_seconds or 0.0)
            if statistics.generated_tokens:
                statistics.add_round(accepted, proposal.mode)
            else:  # from the prompt's own pass
                statistics.near_ties = accepted.near_ties
                statistics.time_to_first_token = time.perf_counter() - begin
            statistics.generated_tokens += len(kept)
            length = len(prompt) + statistics.generated_tokens
            reason = self._finish_reason(text, length, statistics)
            if reason is not None:
                state.trim(length - 1)
            piece = text.read(reason is not None)
            statistics.decode_seconds += time.perf_counter() - resumed
            yield TextDelta(piece, kept, accepted, reason, statistics, anchor, proposal)
            if reason is not None:
                return
            anchor, resumed = kept[-1], time.perf_counter()

    def _finish_reason(self, text: StopText, length: int, statistics: Statistics) -> str | None:
        if text.stopped:
            return "stop"
        if statistics.generated_tokens >= self.config.max_tokens:
            return "length"
        return "context" if length >= self.pair.target.context_length else None

    def check(self, prompt: Sequence[int]) -> None:
        """Raise DFlashError for a prompt that is empty or leaves no room for an answer."""
        limit = self.pair.target.context_length
        if not prompt:
            raise DFlashError("the prompt is empty", "give at least one token")
        if len(prompt) >= limit:
            raise DFlashError(
                f"the prompt has {len(prompt)} tokens, but {self.pair.target.name} can hold "
                f"{limit} with the answer",
                "shorten the prompt or begin a new conversation",
            )


def stream(
    pair: Pair,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    system: str | None = None,
    observer: Observer | None = None,
) -> Iterator[TextDelta]:
    """Answer one prompt, a delta per round.

    prompt: a user's text, or a conversation as messages with "role" and "content".
    Raises DFlashError for an empty or too long prompt and for settings that do not fit the pair.
    For conversations with reused caches see `Session`.
    """
    tokens = prompt_tokens(pair.tokenizer, prompt, system, template=pair.template)
    return Session(pair, config).stream(tokens, observer)


def collect(deltas: Iterator[TextDelta]) -> Answer:
    """Run a stream to its end."""
    texts: list[str] = []
    tokens: list[int] = []
    for delta in deltas:
        texts.append(delta.text)
        tokens.extend(delta.tokens)
    return Answer("".join(texts), tuple(tokens), delta.finish_reason or "", delta.statistics)


def generate(
    pair: Pair,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    system: str | None = None,
) -> Answer:
    """The whole answer to one prompt; arguments and errors as for `stream`."""
    return collect(stream(pair, prompt, config, system))
