"""Layers that are replayed: what they give, what stays outside, when they are forgotten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.verifier import segments
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.segments import Settled
from dflash_mlx.verifier.sequence import Rows
from kernels_metal import factory, gpu
from support.families import VOCAB_SIZE
from support.hybrids import fresh
from support.replays import (
    CHAIN,
    CLOSE,
    PASSES,
    kept,
    make_target,
    nets,
    outputs,
    replayed,
    worst,
)
from support.stand_ins import stand_ins


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Unlike elsewhere in this room."""
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "llama", "qwen3_5", "qwen3_next"])
def test_replayed_layers_give_logits_and_taps_at_every_position_and_along_trees(name):
    target = make_target(name)
    with stand_ins() as called:
        assert worst(target) < CLOSE
        assert replayed(target) == target.num_layers
        assert nets(target) == (2 if name == "qwen3_5" else 0)
        outputs(target, *CHAIN, 11)  # behind a tape as long as next time
        called.clear()
        outputs(target, *CHAIN, 11)
    assert "norm_rope" not in called, "in traces that were made before"
    assert called.count("gated_delta") == nets(target), "the prompt's own, behind nothing"


def test_a_sequence_beside_others_and_sliding_windows_are_replayed_too():
    target = make_target("qwen3", use_sliding_window=True)
    caches = [[*range(9)], [*range(5, 20)]]
    blocks = [(mx.arange(3), Block(3)), PASSES[-1]]

    def together() -> list[mx.array]:
        rows = [Rows(t, fresh(target, p), b) for p, (t, b) in zip(caches, blocks, strict=True)]
        found = [logits for logits, _ in target.forward_all(rows)]
        mx.eval(found)
        return found

    stock = together()
    target.use_kernels("on")
    with stand_ins():
        assert target.joins
        for _ in range(3):
            ours = together()
        assert replayed(target) == target.num_layers
    assert all(mx.abs(a - b).max() < CLOSE for a, b in zip(ours, stock, strict=True))


def test_positions_that_became_constants_of_a_trace_would_be_found(monkeypatch):
    """The fault is planted: what a trace is first given as positions, it is given again."""
    compile_it = mx.compile

    def planted(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        first: dict[Any, mx.array] = {}

        def frozen(*given: Any) -> Any:
            *others, at = given
            if not isinstance(given[0], list) or at.dtype != mx.int32:
                return compile_it(function, **how)(*given)
            return compile_it(function, **how)(*others, first.setdefault(at.shape, at))

        return frozen

    target = make_target()
    with stand_ins():
        monkeypatch.setattr(segments.mx, "compile", planted)
        assert worst(target) > 1e-2


def test_a_model_that_is_called_outside_of_its_targets_passes_runs_as_it_is():
    target = make_target()
    target.use_kernels("on")
    with stand_ins():
        for _ in range(3):
            logits = outputs(target, mx.arange(4), Block(4), 0)[:, :VOCAB_SIZE]
        for cache in (None, make_prompt_cache(target.model)):
            alone = target.model(mx.arange(4)[None], cache=cache)[0]
            assert mx.abs(alone - logits).max() < CLOSE


def test_a_pass_that_fails_half_way_leaves_nothing_to_the_next_one():
    target, cache = make_target(), None
    target.use_kernels("on")
    with stand_ins():
        for _ in range(2):
            cache = fresh(target, [1, 2, 3])
            found = target.forward(*CHAIN[:1], cache, CHAIN[1])[0]
        failing = mock.patch.object(LayerCache, "extend_and_attend", side_effect=RuntimeError)
        with failing, pytest.raises(RuntimeError):
            target.forward(CHAIN[0], cache, CHAIN[1])
        made = target._kernel_hooks.segments
        assert made.at is None and made.held == (None, ())
        target.kernels.fail(RuntimeError("the GPU failed"))  # stock from here on
        cache.discard()
        stock = target.forward(CHAIN[0], cache, CHAIN[1])[0]
        assert mx.abs(found - stock).max() < CLOSE
        assert not target.kernels.active


def test_passes_over_quantised_caches_are_replayed_too():
    target = make_target()
    target.kv_bits = 8
    with stand_ins():
        assert worst(target) < 1e-2  # what differs by rounding alone can be quantised otherwise
        assert replayed(target) == target.num_layers


def test_another_thread_replays_the_layers_that_one_has_traced():
    target = make_target()
    target.use_kernels("on")
    with stand_ins():
        here = [outputs(target, *CHAIN, 11) for _ in range(3)][-1]
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(outputs, target, *CHAIN, 11).result()
        again = outputs(target, *CHAIN, 11)
    assert all(mx.abs(each - here).max() < CLOSE for each in (there, again))


def test_two_targets_on_one_model_keep_their_taps_whoever_switches_kernels():
    one = make_target()
    other = Target(one.model, one.context_length, "the same")
    other.tap((0, one.num_layers - 1))
    stock = outputs(one, *CHAIN, 11)
    with stand_ins():
        for target, mode in ((one, "on"), (other, "on"), (one, "off"), (other, "off")):
            target.use_kernels(mode)
            found = [outputs(each, *CHAIN, 11) for each in 3 * (one, other)]
            assert all(mx.abs(each - stock).max() < CLOSE for each in found)


def test_a_switch_drops_what_was_traced_and_the_layers_are_as_they_were():
    target = make_target()
    kinds = [type(layer) for layer in target.model.layers]
    target.use_kernels("on")
    with stand_ins() as called:
        for _ in range(3):
            outputs(target, *CHAIN, 11)
        assert kept(target)
        with target.kernels.paused():
            called.clear()
            outputs(target, *CHAIN, 11)
        assert not called
        target.use_kernels("off")
    assert not kept(target)
    assert [len(type(layer).__mro__) for layer in target.model.layers] == [
        len(k.__mro__) for k in kinds
    ]


def test_layers_of_one_form_share_traces_whose_number_is_bounded_and_hold_no_weights():
    target = make_target(num_hidden_layers=6)
    target.use_kernels("on")
    with stand_ins():
        for rows in (*range(1, 33), *range(1, 33), 40, 40):
            mx.eval(target.forward(mx.arange(rows), fresh(target, [1, 2]), Block(rows))[0])
        settled = [found for found in kept(target) if isinstance(found, Settled)]
        assert len(settled) == 32
        assert 6 < len(kept(target)) - 32 <= 4 * 32  # the first norm, between two layers, the last
        made = target._kernel_hooks.segments
        assert made.held == (None, ()) and made._caches is None


def python_calls(work: Callable[[], Any]) -> int:
    """Python functions that were called, and MLX's among them."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_replayed_pass_calls_less_than_0_4_of_what_stock_mlx_calls(name, monkeypatch, tmp_path):
    target = make_target(name, num_hidden_layers=16)
    cache = fresh(target, [*range(11)])
    monkeypatch.setattr(gpu, "gpu_family", lambda: "applegpu_g15s")
    calls: list[int] = []

    def traced(x: mx.array) -> list[mx.array]:  # where Metal's kernels can be called without Metal
        for mode in ("off", "on", "on", "on"):
            target.kernels.mode == mode or target.use_kernels(mode)
            with factory.executing(factory.metal):
                calls.append(python_calls(lambda: target.forward(CHAIN[0], cache, CHAIN[1])))
        return [x]

    mx.export_function(str(tmp_path / "traced.mlxfn"), traced, mx.zeros(1))
    stock, settling, tracing, replaying = calls
    assert replaying < 0.4 * stock < tracing < settling
