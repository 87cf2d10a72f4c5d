"""Layers that are replayed: what they give, what stays outside, when they are forgotten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

from dflash_mlx.verifier import segments
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.segments import Settled
from dflash_mlx.verifier.sequence import Rows
from kernels_metal import factory, gpu
from support.decoding import ids_of, tree_of
from support.families import VOCAB_SIZE
from support.hybrids import changed_target, fresh, some_tree
from support.overrides import override
from support.stand_ins import stand_ins

SHAPE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID = {
    **{"head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
SHAPES = {"qwen3": SHAPE, "qwen3_moe": SHAPE, "qwen3_5": HYBRID}
TREE = some_tree(np.random.default_rng(5), 12)
CHAIN = mx.arange(3, 7), Block(4)
PASSES = (
    *((mx.arange(3, 3 + rows), Block(rows)) for rows in (1, 4, 8)),
    (ids_of(TREE), Block.of(TREE)),
)
PREFIXES = 11, 20, 300  # the last with more slots, which attention splits
CLOSE = 2e-4


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Unlike elsewhere in this room."""
    mx.enable_compile()
    yield
    mx.disable_compile()


def make_target(name: str = "qwen3", **changes: Any) -> Target:
    target = changed_target(name, 4, **{**SHAPES.get(name, {}), **changes})
    target.tap((0, target.num_layers - 1))
    for i, (path, module) in enumerate(target.model.named_modules()):
        if type(module) is nn.RMSNorm and path.endswith("norm"):
            noise = mx.random.normal(module.weight.shape, key=mx.random.key(i))
            module.weight = 1 + 0.3 * noise
    return target


def outputs(target: Target, tokens: mx.array, block: Block, before: int) -> mx.array:
    """Logits and features of a block behind a prompt, as one array."""
    cache = fresh(target, [(7 * i + 3) % VOCAB_SIZE for i in range(before)])
    logits, features = target.forward(tokens, cache, block, (0, target.num_layers - 1))
    found = mx.concatenate([logits, features], axis=-1)
    mx.eval(found)
    return found


def worst(target: Target) -> float:
    """By how much passes are off, of which all but the first of every width can be replayed."""
    calls = [(*rows, before) for rows in PASSES for before in PREFIXES]
    target.use_kernels("off")
    stock = [outputs(target, *call) for call in calls]
    target.use_kernels("on")
    found = [outputs(target, *call) for call in calls]
    return max(mx.abs(a - b).max().item() for a, b in zip(found, stock, strict=True))


def replayed(target: Target) -> int:
    """How many layers are, in passes of all widths that were made twice."""
    settled = [found.entries for found in kept(target) if isinstance(found, Settled)]
    return min((sum(entry is not None for entry in entries) for entries in settled), default=0)


def nets(target: Target) -> int:
    """How many of them are gated delta nets that are replayed with their layers."""
    settled = [found.entries for found in kept(target) if isinstance(found, Settled)]
    return min(sum(entry is not None and entry.net is not None for entry in e) for e in settled)


def kept(target: Target) -> list[Any]:
    """How layers compute passes, and traces."""
    return [*target._kernel_hooks.segments._plans._made.values()]


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
    assert not {"norm_rope", "gated_delta"} & {*called}, "in traces that were made before"


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


class OwnMLP(qwen3.MLP):
    """One that nobody knows."""

    calls = 0

    def __call__(self, x):
        type(self).calls += 1
        return super().__call__(x) * 2


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


def test_what_is_not_known_keeps_its_own_call():
    target = make_target()
    layers = target.model.layers
    layers[1].mlp.__class__ = OwnMLP
    seen: list[int] = []
    override(layers[0].self_attn.o_proj, lambda m, call, x: seen.append(1) or 3 * call(m, x))
    with stand_ins():
        assert worst(target) < CLOSE
        assert replayed(target) == target.num_layers
        OwnMLP.calls, seen[:] = 0, []
        outputs(target, *CHAIN, 1)
    assert OwnMLP.calls == len(seen) == 2  # in the prompt's pass and in this one


def test_a_hook_that_comes_later_is_called():
    target, seen = make_target(), []
    target.use_kernels("on")
    with stand_ins():
        for _ in range(3):
            outputs(target, *CHAIN, 11)
        assert replayed(target) == target.num_layers
        norm = target.model.layers[1].post_attention_layernorm
        override(norm, lambda m, call, x: seen.append(1) or call(m, x))
        for _ in range(3):
            outputs(target, *CHAIN, 11)
    assert len(seen) == 6


def changed(target: Target, name: str) -> None:
    """Another weight in a layer that was replayed, or another module in its place."""
    layer = target.model.layers[1]
    if name == "LoRA":
        linear = layer.self_attn.v_proj
        layer.self_attn.v_proj = LoRALinear.from_base(linear, r=4, scale=20.0)
        layer.self_attn.v_proj.lora_b = mx.random.normal(layer.self_attn.v_proj.lora_b.shape)
    elif name == "mlp":
        layer.mlp = target.model.layers[0].mlp
    else:
        module = layer[name] if name in layer else layer.self_attn.get(name) or layer.mlp[name]
        for key in ("scales", "biases") if "scales" in module else ("weight",):
            module[key] = 3 * module[key]


@pytest.mark.parametrize(
    "name",
    [
        *("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"),
        *("v_proj", "o_proj", "up_proj", "down_proj", "mlp", "LoRA"),
    ],
)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_weight_or_module_that_is_replaced_counts_from_the_next_pass_on(name, passes):
    target = make_target()
    target.use_kernels("on")
    with stand_ins():
        before = [outputs(target, *CHAIN, 11) for _ in range(passes)][-1]
        assert replayed(target) == target.num_layers
        changed(target, name)
        ours = [outputs(target, *CHAIN, 11) for _ in range(3)]
        target.use_kernels("off")
        stock = outputs(target, *CHAIN, 11)
    assert all(mx.abs(each - stock).max() < CLOSE for each in ours)
    assert mx.abs(stock - before).max() > 1e-2


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


@pytest.mark.parametrize(("family", "key"), [("qwen3", "weight"), ("qwen2", "bias")])
@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_one_array_of_a_product_is_replaced_alone(family, key, name):
    target = make_target(family)
    target.use_kernels("on")
    with stand_ins():
        for _ in range(3):
            before = outputs(target, *CHAIN, 11)
        module = target.model.layers[1].self_attn[name]
        key = key if key in module else "biases"
        module[key] = module[key] ^ mx.array(5, mx.uint32) if key == "weight" else 2 * module[key]
        ours = [outputs(target, *CHAIN, 11) for _ in range(3)]
        target.use_kernels("off")
        stock = outputs(target, *CHAIN, 11)
    assert all(mx.abs(each - stock).max() < CLOSE for each in ours)
    assert mx.abs(stock - before).max() > 1e-3


def test_norms_of_attention_are_replaced_by_others_whose_weights_change_later():
    target = make_target()
    target.use_kernels("on")
    with stand_ins():
        for scale in (1, 2, 3):
            attention = target.model.layers[1].self_attn
            if scale == 2:
                attention.q_norm = nn.RMSNorm(64, eps=attention.q_norm.eps)
            attention.q_norm.weight = scale * attention.q_norm.weight
            ours = [outputs(target, *CHAIN, 11) for _ in range(3)]
            with target.kernels.paused():
                stock = outputs(target, *CHAIN, 11)
            assert all(mx.abs(each - stock).max() < CLOSE for each in ours)


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
