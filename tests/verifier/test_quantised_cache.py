"""Caches that hold keys and values quantised: exact moves, exact trees, plain decoding's text."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import SLACK, LayerCache, pack, unpack
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import KeyValues
from kernels_metal.emulator import emulated
from support import rounding
from support.decoding import ids_of, start, tokens_in, tree_of
from support.families import FAMILIES
from support.hybrids import (
    changed_target,
    forward,
    fresh,
    plain_answer,
    rounds,
    some_tree,
    worst_node,
)
from support.toys import foretold, prompt_of

BITS = [4, 8]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Families with head dims that can be quantised, and what is special about each.
WIDE = {
    "llama": {"head_dim": 64},
    "llama_sliding": {"head_dim": 32},
    "gemma2": {"head_dim": 32},  # computes its attention itself
    "gemma3_text": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32},  # sinks
    "gemma4_text_shared_kv": {"head_dim": 32},  # layers that read the cache of another
    "deepseek_v3": {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32},  # compressed, two widths
}


def random_rows(count: int, width: int = 64, heads: int = 2, seed: int = 0) -> mx.array:
    return mx.random.normal((1, heads, count, width), key=mx.random.key(seed))


def wide_target(name: str, bits: int | None) -> Target:
    target = changed_target(name, **WIDE[name])
    target.kv_bits = bits
    return target


targets = cache(wide_target)


# What is stored


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_stored_alike_by_passes_of_any_width(bits, dtype):
    keys, values = random_rows(24).astype(dtype), random_rows(24, seed=1).astype(dtype)
    stored = []
    for width in (1, 8, 24):
        cache = LayerCache(kv_bits=bits)
        for at in range(0, 24, width):
            cache.begin(Block(width))
            rows = slice(at, at + width)
            cache.update_and_fetch(keys[:, :, rows], values[:, :, rows])
            KeyValues([cache]).commit(range(width))
        stored.append(cache.arrays)
    for arrays in zip(*stored, strict=True):
        narrow, *wider = (array[:, :, :24] for array in arrays)
        assert all(mx.array_equal(narrow, wide) for wide in wider)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [32, 64, 96, 128, 576])
def test_attention_sees_what_is_stored_close_to_what_was_written(bits, width):
    rows = random_rows(5, width)
    cache = LayerCache(kv_bits=bits)
    cache.begin(Block(5))
    keys, _ = cache.update_and_fetch(rows, rows)
    assert keys.shape == rows.shape and keys.dtype == rows.dtype
    assert mx.array_equal(keys, unpack(pack(rows, bits), bits))
    group = 64 if width % 64 == 0 else 32
    step = rows.reshape(1, 2, 5, -1, group)
    step = (step.max(-1) - step.min(-1)) / (2**bits - 1)
    error = mx.abs(keys - rows).reshape(1, 2, 5, -1, group).max(-1)
    assert (error <= step).all() and error.max() > 0  # the grid is moved so that 0 stays 0


@pytest.mark.parametrize("width", [16, 80])
def test_widths_that_no_group_divides_are_refused_with_the_width(width):
    rows = random_rows(1, width)
    expected = rf"are {width} numbers wide, .* no multiple of 32.*; leave out kv_bits="
    with pytest.raises(DFlashError, match=expected):
        LayerCache(kv_bits=8).update_and_fetch(rows, rows)
    LayerCache().update_and_fetch(rows, rows)


# Commit, discard, trim and fork


@dataclass
class Sequence:
    """A cache, and in a list what its committed rows should be."""

    cache: LayerCache
    rows: list[mx.array] = field(default_factory=list)

    def step(self, rng: np.random.Generator) -> None:
        """A block, of which nothing or a path is kept; sometimes some rows are taken back."""
        count = int(rng.integers(1, 9))
        block = random_rows(count, 32, seed=int(rng.integers(2**30)))
        self.cache.begin(Block(count))
        keys, values = self.cache.update_and_fetch(block, -block)
        self.check(keys, block)
        self.check(-values, block)
        path = [i for i in range(count) if rng.random() < 0.6]
        if not path:
            self.cache.discard()
            return
        KeyValues([self.cache]).commit(path)
        self.rows += [block[:, :, i] for i in path]
        length = len(self.rows) - int(rng.integers(4))
        if rng.random() < 0.3 and length > 0 and self.cache.nearest(length) == length:
            self.cache.rewind(length)
            del self.rows[length:]

    def check(self, found: mx.array, block: mx.array) -> None:
        bits, window = self.cache.kv_bits, self.cache.window
        before = self.rows if window is None else self.rows[max(0, len(self.rows) - window + 1) :]
        expected = mx.concatenate([mx.stack(before, axis=2), block], axis=2) if before else block
        expected = expected if bits is None else unpack(pack(expected, bits), bits)
        assert mx.abs(found - expected).max() < 1e-6


@settings(max_examples=12)
@given(seed=st.integers(0, 2**16), window=st.sampled_from([None, 3, 20]))
@pytest.mark.parametrize("bits", [None, *BITS])
def test_whatever_happens_to_blocks_the_cache_holds_the_committed_rows(bits, seed, window):
    rng = np.random.default_rng(seed)
    sequence = Sequence(LayerCache(window, kv_bits=bits))
    for _ in range(6):
        sequence.step(rng)
    other = Sequence(sequence.cache.fork(), list(sequence.rows))
    for _ in range(3):
        other.step(rng)
        sequence.step(rng)


@pytest.mark.parametrize("bits", BITS)
def test_a_window_gives_quantised_slots_up_as_well(bits):
    cache = LayerCache(window=8, kv_bits=bits)
    for _ in range(40):
        cache.begin(Block(50))
        cache.update_and_fetch(random_rows(50), random_rows(50))
        KeyValues([cache]).commit(range(50))
    assert {array.shape[2] for array in cache.arrays} <= {256 + 7 + SLACK}
    assert cache.nearest(2000 - SLACK) == 2000 - SLACK and cache.nearest(1000) < 1000


# Targets


def off_row_by_row(target: Target, seed: int) -> float:
    """How far a tree's logits are from those of one-row passes over each node's own path."""
    cache = fresh(target, prompt_of(seed, 20), step=9)
    start = cache.fork()

    def alone(path):
        rows, own = [], start.fork()
        for token in path:
            rows.append(forward(target, own, [token])[0])
            own.commit([0])
        return mx.stack(rows), None

    worst = worst_node(target, cache, some_tree(np.random.default_rng(seed), 5), alone)
    assert np.isfinite(worst)
    return worst


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", WIDE)
def test_every_node_of_a_tree_equals_its_own_path_token_by_token(name, bits):
    """In two of three trees: a number on the edge between two steps may be rounded either way."""
    worst = [off_row_by_row(targets(name, bits), seed) for seed in range(3)]
    assert sorted(worst)[1] < 1e-4


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["llama", "llama_sliding", "gpt_oss"])
def test_greedy_answers_with_drafts_are_those_without_them(name, bits):
    target = targets(name, bits)
    for seed in range(2):
        prompt = prompt_of(seed)
        plain = plain_answer(target, prompt, 28)
        drafter = foretold(prompt, plain, seed)
        drafted = list(rounds(target, drafter, start(target, drafter, prompt), 28))
        assert tokens_in(drafted) == plain
        assert len(drafted) < 0.7 * 28


@pytest.mark.parametrize("bits", BITS)
def test_exact_answers_are_plain_ones_though_passes_of_other_widths_round_otherwise(
    bits, monkeypatch
):
    """Quantising makes small differences larger now and then, which the guard has measured."""
    monkeypatch.setitem(FAMILIES, "llama", {**FAMILIES["llama"], **WIDE["llama"]})
    target = rounding.Rounding("llama", 0.003)
    target.kv_bits = bits
    changed = 0
    for seed in range(2):
        plain = rounding.plain_answer(target, seed)
        exact, statistics = rounding.drafted_answer(target, seed, rounding.EXACT)
        assert exact == plain
        changed += statistics.near_ties.changed
    assert changed > 0


def test_the_attention_kernel_takes_what_is_stored_and_the_commit_says_why_it_cannot():
    target, tree = wide_target("llama", 4), tree_of([3, 1, 4, 1], [-1, 0, 0, 1])
    sequence = fresh(target, prompt_of(2, 20))
    stock, _ = target.forward(ids_of(tree), sequence.fork(), Block.of(tree))
    target.use_kernels("on")
    with emulated() as run:
        ours, _ = target.forward(ids_of(tree), sequence, Block.of(tree))
        mx.eval(ours)
        sequence.commit([0, 2])
    assert run.of("cascade_attention") and not run.of("cache_commit")
    heads, slots = 2, 20 + len(tree)
    for counters in run.of("cascade_attention"):  # half a byte for each number
        assert {counters.buffers[name].read for name in ("keys", "values")} == {
            heads * slots * 64 // 2
        }
    assert mx.abs(ours - stock).max() < 1e-4
    assert target.kernels.choices["cache_commit"].reason == "keys and values are quantised"
