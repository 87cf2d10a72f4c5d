"""Gated delta nets that are replayed with their layers: their state, their weights, their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.verifier import segments
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import Rows
from support.decoding import ids_of, tree_of
from support.families import VOCAB_SIZE
from support.hybrids import fresh, some_tree
from support.overrides import override
from support.replays import CHAIN, CLOSE, PASSES, make_target, nets, outputs
from support.stand_ins import stand_ins


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Unlike elsewhere in this room."""
    mx.enable_compile()
    yield
    mx.disable_compile()


def of_another_length(target: Target, prompt: int, rows: Any) -> mx.array:
    """Logits behind a prompt that took two passes, so that there are states and a tape."""
    tokens = [(prompt * i + 3) % VOCAB_SIZE for i in range(11)]
    found, _ = target.forward(*rows[:1], fresh(target, tokens, 6), rows[1])
    mx.eval(found)
    return found


@pytest.mark.parametrize("place", [None, 0, 1, 2, 3, 4, 5, 6])
def test_a_net_whose_trace_holds_what_it_was_first_given_would_be_found(place, monkeypatch):
    """The fault is planted, in each of the arrays that come from the pass before."""
    compile_it = mx.compile

    def planted(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        run, first = compile_it(function, **how), {}

        def frozen(arrays: Any, before: Any, *given: Any) -> Any:
            if isinstance(before, list) and len(before) == 7 and place is not None:
                old = first.setdefault(before[place].shape, before[place])
                before = [*before[:place], old, *before[place + 1 :]]
            return run(arrays, before, *given)

        return frozen

    target = make_target("qwen3_5")
    trees = [tree_of([1, 2, 3, 4], parents) for parents in ([-1, 0, 0, 1], [-1, 0, 0, 2])]
    calls = [(i, (ids_of(tree), Block.of(tree))) for i, tree in zip((7, 5), trees, strict=True)]
    stock = [of_another_length(target, *call) for call in calls]
    target.use_kernels("on")
    with stand_ins():
        monkeypatch.setattr(segments.mx, "compile", planted)
        for _ in range(2):
            found = [of_another_length(target, *call) for call in calls]
        assert nets(target) == 2
    off = max(mx.abs(a - b).max().item() for a, b in zip(found, stock, strict=True))
    assert off < CLOSE if place is None else off > 1e-3


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "scales") for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj")),
        *(("conv1d", "weight"), ("norm", "weight"), ("", "A_log"), ("", "dt_bias")),
    ],
)
def test_a_weight_of_a_gated_delta_net_counts_from_the_next_pass_on(name, key):
    target = make_target("qwen3_5")
    target.use_kernels("on")
    with stand_ins():
        before = [outputs(target, *CHAIN, 11) for _ in range(3)][-1]
        assert nets(target) == 2
        net = target.model.layers[0].linear_attn
        module = net[name] if name else net
        module[key] = 3 * module[key] + (key == "dt_bias")
        ours = [outputs(target, *CHAIN, 11) for _ in range(3)]
        assert nets(target) == 2
        target.use_kernels("off")
        stock = outputs(target, *CHAIN, 11)
    assert all(mx.abs(each - stock).max() < CLOSE for each in ours)
    assert mx.abs(stock - before).max() > 1e-3


@pytest.mark.parametrize("name", ["", "in_proj_b", "norm", "out_proj"])
def test_a_hook_on_a_gated_delta_net_or_a_part_of_it_is_called(name):
    target, seen = make_target("qwen3_5"), []
    target.use_kernels("on")
    with stand_ins():
        for _ in range(3):
            outputs(target, *CHAIN, 11)
        net = target.model.layers[0].linear_attn
        override(net[name] if name else net, lambda m, call, *x: seen.append(1) or call(m, *x))
        for _ in range(3):
            outputs(target, *CHAIN, 11)
        assert nets(target) == 1
    assert len(seen) == 6


def test_sequences_side_by_side_leave_nets_that_were_replayed_to_their_own_calls():
    target = make_target("qwen3_5")
    rows = [(mx.arange(3), Block(3), 9), (mx.arange(9), Block(9), 20)]

    def together() -> list[mx.array]:
        given = [Rows(t, fresh(target, [*range(n)]), block) for t, block, n in rows]
        found = [logits for logits, _ in target.forward_all(given)]
        mx.eval(found)
        return found

    stock = together()
    target.use_kernels("on")
    with stand_ins():
        for _ in range(2):
            outputs(target, *PASSES[-1], 11)  # as many rows as theirs
        assert nets(target) == 2
        for _ in range(3):
            ours = together()
            assert all(mx.abs(a - b).max() < CLOSE for a, b in zip(ours, stock, strict=True))


def test_trees_of_many_forms_come_to_few_traces(monkeypatch):
    made: list[int] = []
    compile_it = mx.compile

    def counted(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        if function.__module__ != segments.__name__:
            return compile_it(function, **how)
        return compile_it(lambda *given: made.append(1) or function(*given), **how)

    monkeypatch.setattr(segments.mx, "compile", counted)
    target, random = make_target("qwen3_5"), np.random.default_rng(0)
    target.use_kernels("on")
    with stand_ins():
        cache = fresh(target, [*range(11)])
        for _ in range(60):
            tree = some_tree(random, 12)
            mx.eval(target.forward(ids_of(tree), cache, Block.of(tree))[0])
            with target.kernels.paused():
                cache.commit([*np.flatnonzero(tree.ancestors[random.integers(12)]).tolist()])
        assert nets(target) == 2
    assert len(made) < 24
