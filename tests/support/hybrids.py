"""Passes over a target and answers of it, as its tests share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache
from dflash_mlx.verifier.tape import settled
from kernels_metal.emulator import Run, emulated
from support.decoding import ids_of, path_to, start, tokens_in, tree_of
from support.decoding import rounds as decode
from support.families import VOCAB_SIZE, make_model
from support.toys import Scripted, random_tree


@cache
def target_of(name: str) -> Target:
    """A tiny model of a family; the same one for all tests."""
    return Target(make_model(name), 4096, name)


def changed_target(name: str, bits: int | None = None, mode: str = "affine", **settings: Any):
    """A tiny model of a family whose config has other settings; quantised where there are bits."""
    model = make_model(name, **settings)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits, mode=mode)
    return Target(model, 512, name)


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


WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # enough to quantise
PROMPT = list(range(11))
FEW_NODES = tree_of([3, 1, 4, 1, 5, 9], [-1, 0, 0, 1, 2, 2])
BLOCKS = {
    "one": (mx.array([5]), Block(1)),
    "chain": (mx.array([5, 6, 7]), Block(3)),
    "nine": (mx.arange(9), Block(9)),
    "last": (mx.arange(9), Block(9, last_only=True)),
    "tree": (ids_of(FEW_NODES), Block.of(FEW_NODES)),
}


def pass_over(target: Target, block: str = "tree", run: Run | None = None) -> tuple[mx.array, Run]:
    """Logits of a block behind PROMPT, and what ran in the emulator for this pass alone."""
    if run is None:
        with emulated() as run:
            return pass_over(target, block, run)
    sequence = fresh(target, PROMPT)
    mx.eval(sequence.arrays)
    run.counters.clear()
    logits, _ = target.forward(BLOCKS[block][0], sequence, BLOCKS[block][1])
    mx.eval(logits)
    return logits, run


def through_both(target: Target, block: str = "tree") -> Run:
    """What runs in the emulator, after a look that it gives what stock MLX gives."""
    target.use_kernels("off")
    stock, _ = pass_over(target, block)
    target.use_kernels("on")
    ours, run = pass_over(target, block)
    assert mx.abs(ours - stock).max().item() < 1e-4
    return run


def some_tree(rng: np.random.Generator, nodes: int = 8) -> Tree:
    """Of up to so many nodes behind an anchor."""
    tokens, parents = random_tree(rng, nodes, VOCAB_SIZE)
    return tree_of([int(rng.integers(VOCAB_SIZE)), *tokens], [-1, *parents])


def tokens_on(tree: Tree, path: Sequence[int]) -> list[int]:
    ids = ids_of(tree).tolist()
    return [ids[node] for node in path]


Alone = Callable[[list[int]], tuple[Any, Any]]


def worst_node(
    target: Target,
    cache: SequenceCache,
    tree: Tree,
    alone: Alone,
    aux_layers: tuple[int, ...] = (),
) -> float:
    """By how much any node of a pass is off, which is left running; no number where one is none.

    alone: logits and features that a path of tokens should have; of features their share of the
    largest in their row counts.
    """
    logits, features = target.forward(ids_of(tree), cache, Block.of(tree), aux_layers)
    off = []
    for leaf in set(range(len(tree))) - set(tree.parents):
        path = path_to(tree, leaf)
        expected, states = alone(tokens_on(tree, path))
        off.append(np.abs(np.array(logits)[path] - np.array(expected)).max())
        if features is not None:
            apart, size = np.abs(np.array(features)[path] - np.array(states)), np.abs(states)
            off.append((apart.max(axis=-1) / np.array(size).max(axis=-1)).max())
    return float(np.max(off))


def difference(target: Target, cache: SequenceCache, tokens: Sequence[int]) -> float:
    """By how much a cache is off from one fresh pass over `tokens`.

    The largest of: any number of a recurrent state, over that of the state's largest (or 1), and
    any logit of two more tokens; no number, where any of these is none.
    """
    assert cache.length == len(tokens)
    expected = fresh(target, tokens)
    ours, theirs = (
        [settled(state) for layer in c.parts[0].parts for state in layer.cache if state is not None]
        for c in (cache, expected)
    )
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
