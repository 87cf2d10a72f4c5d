"""Passes over a target and answers of it, as its tests share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache
from support.decoding import rounds as decode
from support.decoding import start, tokens_in
from support.families import VOCAB_SIZE, make_model
from support.toys import Scripted


@cache
def target_of(name: str) -> Target:
    """A tiny model of a family; the same one for all tests."""
    return Target(make_model(name), 4096, name)


def rounds(target, drafter, state: State, max_tokens: int):
    return decode(target, drafter, state, DecodeConfig(max_tokens=max_tokens))


def run(target, drafter, state: State, max_tokens: int) -> list[int]:
    return tokens_in(rounds(target, drafter, state, max_tokens))


def plain_answer(target, prompt: list[int], max_tokens: int) -> list[int]:
    return run(target, NoDraft(), start(target, NoDraft(), prompt), max_tokens)


def forward(target: Target, cache: SequenceCache, tokens: Sequence[int]) -> mx.array:
    return target.forward(mx.array(tokens), cache, Block(len(tokens)))[0]


def fresh(target: Target, tokens: Sequence[int], step: int = 512) -> SequenceCache:
    """A cache that passes over `tokens` have written, `step` at a time."""
    cache = target.new_cache()
    for at in range(0, len(tokens), step):
        chunk = tokens[at : at + step]
        mx.eval(forward(target, cache, chunk))
        cache.commit(range(len(chunk)))
    return cache


def difference(target: Target, cache: SequenceCache, tokens: Sequence[int]) -> float:
    """By how much a cache is off from one fresh pass over `tokens`.

    The largest of: any number of a recurrent state, over that of the state's largest (or 1), and
    any logit of two more tokens; no number, where any of these is none.
    """
    assert cache.length == len(tokens)
    expected = fresh(target, tokens)
    ours, theirs = (c.parts[0].arrays for c in (cache, expected))
    assert len(ours) == len(theirs)
    off = [
        np.abs(np.array(a) - np.array(b)).max() / max(1.0, np.abs(np.array(b)).max())
        for a, b in zip(ours, theirs, strict=True)
    ]
    logits = [np.array(forward(target, c.fork(), [3, 5])) for c in (cache, expected)]
    return float(np.max([*off, np.abs(logits[0] - logits[1]).max()]))


def oracle(prompt: list[int], plain: list[int], case: Callable[[], tuple[int, int]]) -> Scripted:
    """Chains of plain decoding's tokens, all wrong behind the first few.

    case: how many tokens to draft and how many of them are right, round after round.
    """

    def script(tokens: list[int], remaining: int) -> tuple[list[int], list[int]]:
        at = len(tokens) - len(prompt)
        drafted, right = case()
        ahead = plain[at : at + min(drafted, remaining - 1)]
        ahead = ahead[:right] + [(token + 1) % VOCAB_SIZE for token in ahead[right:]]
        return ahead, list(range(len(ahead)))

    return Scripted(script)


def some_right(seed: int) -> Callable[[], tuple[int, int]]:
    """One to four drafts, of which none, one, some or all are right, by chance."""
    rng = np.random.default_rng(seed)

    def case() -> tuple[int, int]:
        drafted = int(rng.integers(1, 5))
        return drafted, int(rng.choice([0, 1, rng.integers(drafted + 1), drafted]))

    return case
