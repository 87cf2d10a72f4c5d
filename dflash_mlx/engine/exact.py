"""Greedy answers that are plain decoding's token by token: near-ties are decided again.

A pass over several rows adds its floating-point numbers in another order than a pass over one, so
its logits differ a little from plain decoding's: through the pass itself, and through the keys and
values that earlier passes of that kind left in the cache. Where the best two logits are closer
than that, their order means nothing. Such a node is decided by a pass over its token alone behind
its ancestors; where that is too close as well, given what the cache carries, all tokens since the
last such case are computed again one by one, as plain decoding computed them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from dflash_mlx.core.prompt import shared_length
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Accepted, NearTies, Tree, accept
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import TargetSampling, Verdict
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

SAFETY = 2.0  # times the largest difference that was measured
_TOKENS = 32  # of the prompt and of the answer that are measured
_WIDTHS = (2, 4, 8, 16, 48)


@dataclass(frozen=True)
class Noise:
    """By how much the difference of two logits can be off from plain decoding's."""

    wide: float  # in a pass over several rows
    cache: float  # in a pass over one row, behind keys and values of wider passes


def noise_of(target: Target) -> Noise:
    """As `measure_noise`; measured once per loaded target, which remembers it."""
    noise: Noise = target.noise or measure_noise(target)
    target.noise = noise
    return noise


def measure_noise(target: Target) -> Noise:
    """Compare passes of 2 to 48 rows with one-row passes along a short greedy answer.

    Takes about 50 one-row passes. Both figures are SAFETY times the largest spread of the
    differences over the vocabulary, over all compared rows.
    """
    tokens = min(_TOKENS, target.context_length // 4)
    start = _prompt_cache(target, tokens)
    answer, plain = _greedy(target, start.fork(), tokens)
    cache, wide, behind = start.fork(), 0.0, 0.0
    for logits, at in _wide_passes(target, cache, answer):
        end = at + logits.shape[0]
        wide = max(wide, _spread(logits, plain[at:end]))
        for i in range(at | 1, end, 2):
            fork = cache.fork()
            fork.commit(range(i - at))
            row, _ = target.forward(mx.array([answer[i]]), fork, Block(1))
            behind = max(behind, _spread(row, plain[i : i + 1]))
    return Noise(SAFETY * max(wide, behind), SAFETY * behind)


def _prompt_cache(target: Target, tokens: int) -> SequenceCache:
    """Behind tokens from all over the vocabulary, which are nobody's words."""
    cache = target.new_cache()
    vocabulary = target.forward(mx.zeros(1, mx.int32), cache, Block(1))[0].shape[-1]
    prompt = mx.arange(tokens) * vocabulary // tokens
    target.forward(prompt, cache, Block(tokens))
    cache.commit(range(tokens))
    mx.eval(cache.arrays)
    return cache


def _greedy(target: Target, cache: SequenceCache, tokens: int) -> tuple[list[int], mx.array]:
    answer, rows = [0], []
    for _ in range(tokens):
        logits, _ = target.forward(mx.array(answer[-1:]), cache, Block(1))
        cache.commit([0])
        rows.append(logits)
        answer.append(mx.argmax(logits, axis=-1).item())  # type: ignore[arg-type]
    return answer, mx.concatenate(rows)


def _wide_passes(
    target: Target, cache: SequenceCache, answer: list[int]
) -> Iterator[tuple[mx.array, int]]:
    """Commit the answer by passes of several rows; before that, the logits kept and their place."""
    at, last, number = 0, len(answer) - 1, 0
    remaining = target.context_length - cache.length - last
    while at < last:
        width = min(_WIDTHS[number % len(_WIDTHS)], remaining)
        kept = min(max(1, width // 4), last - at)
        rows = [*answer[at : at + kept], *range(width - kept)]
        logits, _ = target.forward(mx.array(rows), cache, _block(target, kept, width))
        yield logits[:kept], at
        cache.commit(range(kept))
        at, number = at + kept, number + 1


def _block(target: Target, kept: int, width: int) -> Block:
    """A tree whose first rows are the answer's; a chain where trees cannot be verified."""
    if not target.takes_trees:
        return Block(width)
    parents = [*range(-1, kept - 1), *((i - 1) // 2 for i in range(kept, width))]
    return Block.of(Tree((0,) * (width - 1), tuple(parents)))


def _spread(logits: mx.array, plain: mx.array) -> float:
    off = mx.nan_to_num(logits.astype(mx.float32) - plain.astype(mx.float32))
    return (off.max(axis=-1) - off.min(axis=-1)).max().item()  # type: ignore[return-value]


def lead(logits: mx.array) -> tuple[mx.array, mx.array]:
    """The best token of logits [..., V] and by how much it leads the second, [...] each."""
    logits = logits.astype(mx.float32)
    best = mx.argmax(logits, axis=-1, keepdims=True)
    others = mx.put_along_axis(logits, best, mx.array(-mx.inf), axis=-1)
    return best[..., 0], logits.max(axis=-1) - others.max(axis=-1)


class NearTieGuard(TargetSampling):
    """The rule of `--exact`: plain decoding's tokens, as far as the noise is what was measured."""

    def __init__(self, target: Target, sampler: Sampler, noise: Noise) -> None:
        super().__init__(sampler)
        self.target, self.noise = target, noise
        self._twin: SequenceCache | None = None  # written by one-row passes alone since the prompt
        self._plain_rows = 0  # that the state's own cache has, the first ones

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """As `TargetSampling`, with every near-tie decided as plain decoding decides it."""
        if self._twin is None:  # the token behind the prompt
            self._twin, self._plain_rows = state.cache.fork(), state.position
            self.remembers = True
        untouched = state.position == self._plain_rows
        if untouched and verdict.is_plain:
            self._plain_rows += state.anchor.size  # none behind the prompt, which is committed
            return replace(super().accept(verdict, state), near_ties=NearTies())
        look = _CloserLook(self, verdict, state, untouched)
        accepted = accept(verdict.tree, look.choose)
        return replace(accepted, near_ties=look.ties)

    def replay(self, tokens: list[int]) -> tuple[mx.array, int]:
        """Plain logits [V] after `tokens`, all of the sequence, and how many passes that took."""
        assert self._twin is not None
        new = tokens[self._twin.length :]
        for token in new:
            logits, _ = self.target.forward(mx.array([token]), self._twin, Block(1))
            self._twin.commit([0])
            mx.eval(self._twin.arrays)
        return logits[0], len(new)


@dataclass
class _CloserLook:
    """One round of a guard."""

    guard: NearTieGuard
    verdict: Verdict
    state: State
    untouched: bool  # all rows in the cache are plain decoding's
    ties: NearTies = NearTies()

    @cached_property
    def leads(self) -> tuple[mx.array, mx.array]:
        found = lead(self.verdict.logits)
        mx.eval(found)
        return found

    def choose(self, path: tuple[int, ...]) -> int:
        token, margin = self._lead(path)
        noise, plain = self.guard.noise, self.verdict.is_plain
        if margin >= self._scaled(noise.cache if plain else noise.wide):
            return token
        start, passes, replays, again = time.perf_counter(), 0, 0, token
        if not plain:
            again, margin = self._best(self._one_row(path), path)
            passes = 1
        if not (self.untouched and len(path) == 1) and margin < self._scaled(noise.cache):
            logits, replayed = self.guard.replay(self._before(path))
            again, _ = self._best(logits, path)
            passes, replays = passes + replayed, 1
        seconds = time.perf_counter() - start
        self.ties += NearTies(1, passes, replays, int(again != token), seconds)
        return again

    def _lead(self, path: tuple[int, ...]) -> tuple[int, float]:
        if self.guard.sampler.adjusts:
            return self._best(self.verdict.logits[path[-1]], path)
        tokens, margins = self.leads
        return tokens[path[-1]].item(), margins[path[-1]].item()  # type: ignore[return-value]

    def _best(self, logits: mx.array, path: tuple[int, ...]) -> tuple[int, float]:
        """The greedy choice from logits [V] and its lead over the second."""
        if self.guard.sampler.adjusts:
            logits = self.guard.sampler.adjusted(logits, self._before(path))
        token, margin = lead(logits)
        return token.item(), margin.item()  # type: ignore[return-value]

    def _scaled(self, noise: float) -> float:
        """A repetition penalty multiplies some logits, and their noise; what is added rounds."""
        penalty = self.guard.sampler.config.repetition_penalty
        rounding = 2**-15 if self.guard.sampler.adjusts else 0.0  # of two sums below 256, twice
        return noise * max(penalty, 1 / penalty) + rounding

    def _one_row(self, path: tuple[int, ...]) -> mx.array:
        fork = self.state.cache.fork()
        fork.commit(path[:-1])
        tokens = self.verdict.ids[path[-1] :][:1]
        return self.guard.target.forward(tokens, fork, Block(1))[0][0]

    def _before(self, path: tuple[int, ...]) -> list[int]:
        drafted = self.verdict.tree.drafted
        return [*self.state.tokens, *(drafted[node - 1] for node in path[1:])]


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the plain one."""

    position: int
    margin: float | None  # between the two tokens' logits; None where one answer just goes on

    @property
    def is_near_tie(self) -> bool:
        """Whether the order of floating-point sums can explain it."""
        return self.margin is not None and self.margin < 1e-3


def first_difference(
    target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Compare two answers; the margin comes from one fresh pass over the shared tokens."""
    at = shared_length(plain, other)
    if at == len(plain) == len(other):
        return None
    if at in (len(plain), len(other)):
        return Difference(at, None)
    tokens = mx.array([*prompt, *plain[:at]])
    logits, _ = target.forward(tokens, target.new_cache(), Block(tokens.shape[0]))
    margin = mx.abs(logits[-1, plain[at]] - logits[-1, other[at]])
    return Difference(at, margin.item())  # type: ignore[arg-type]
