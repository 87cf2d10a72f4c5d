"""A race: the same question decoded plainly and with drafts, in turns, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx

from dflash_mlx.core.config import PLAIN as NO_DRAFTS
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import draws_drafts, settle
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.exact import Difference, first_difference
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Question, Session
from dflash_mlx.session.templates import prompt_tokens

SIDES = PLAIN, DRAFTED = "plain", "drafted"
SLICE = 1.0  # seconds that one side of a race runs before the other may


@dataclass(frozen=True)
class RaceStep:
    """One side of a race moved on."""

    side: str
    text: str  # what came new
    tokens: int
    seconds: float  # its own decoding time so far
    finished: bool


@dataclass(frozen=True)
class RaceResult:
    """How a race ended."""

    text: str  # a sentence
    equal: bool  # whether every token is the same


def race(pair: Pair, request: Question) -> Iterator[RaceStep | RaceResult]:
    """Both sides in turn, always the one that has had less time, from the same seed."""
    if request.config.method == NO_DRAFTS:
        raise DFlashError(
            "the method is none, so both sides would decode plainly", "choose another --method"
        )
    sampling = request.config.sampling.with_seed()
    config = settle(replace(request.config, sampling=sampling), pair.capabilities)
    if draws_drafts(config):
        raise DFlashError(
            "answers drawn by rejection differ from plain ones, by design",
            "leave out --acceptance to compare them token by token",
        )
    tokens = prompt_tokens(pair.tokenizer, request.messages, request.system, template=pair.template)
    plain = Lane(PLAIN, Session(pair, replace(config, method=NO_DRAFTS)).stream(tokens))
    drafted = Lane(DRAFTED, Session(pair, config).stream(tokens))
    while running := [lane for lane in (drafted, plain) if not lane.finished]:
        yield from min(running, key=lambda lane: lane.seconds).run(SLICE)
    difference = first_difference(pair.target, tokens, plain.tokens, drafted.tokens)
    yield result_of(plain, drafted, difference)


@dataclass
class Lane:
    """One side of a race."""

    side: str
    deltas: Iterator[Delta]
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of decoding, the device's unfinished work included
    finished: bool = False

    def run(self, seconds: float) -> Iterator[RaceStep]:
        """Decode for so long, then wait for the device, lest it work in the other's time."""
        end = self.seconds + seconds
        while self.seconds < end and not self.finished:
            begin = time.perf_counter()
            delta = next(self.deltas)
            first = not self.tokens
            self.tokens.extend(delta.tokens)
            self.finished = delta.finish_reason is not None
            self.seconds += time.perf_counter() - begin
            if first:
                self.seconds -= delta.statistics.prefill_seconds
            yield RaceStep(self.side, delta.text, len(self.tokens), self.seconds, self.finished)
        begin = time.perf_counter()
        mx.synchronize()
        self.seconds += time.perf_counter() - begin


def result_of(plain: Lane, drafted: Lane, difference: Difference | None) -> RaceResult:
    """Who was faster, and whether both said the same, token by token."""
    ratio = plain.seconds / drafted.seconds * len(drafted.tokens) / len(plain.tokens)
    speed = f"{ratio:.2f} times as fast as plain decoding on this question"
    if difference is None:
        return RaceResult(f"All {len(plain.tokens)} tokens are the same. {speed}.", True)
    if difference.margin is None:
        why = "one answer ends there"
    elif difference.is_near_tie:
        why = f"where two tokens are all but tied (logits {difference.margin:.1e} apart)"
    else:
        why = f"with logits {difference.margin:.2f} apart, which is no tie: please report it"
    return RaceResult(f"The same up to token {difference.position}, {why}. {speed}.", False)
