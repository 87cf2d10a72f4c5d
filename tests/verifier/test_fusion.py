"""Products of one input as one: what they give, what they keep, and when they go alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.fusion import groups_in
from dflash_mlx.verifier.model import Target
from kernels_metal.emulator import Run, emulated
from kernels_metal.shared_input import SHARED_INPUT, apart, side_by_side, together
from kernels_metal.verify_qmm import GROUPS
from support.families import make_model
from support.kernels import arguments, assert_close, exact

ROWS = mx.arange(9)


def make_target(name: str = "llama", bits: int = 4) -> Target:
    model = make_model(name)
    nn.quantize(model, group_size=32, bits=bits)
    return Target(model, 200, name)


def logits(target: Target, rows: mx.array = ROWS) -> mx.array:
    found, _ = target.forward(rows, target.new_cache(), Block(rows.size))
    mx.eval(found)
    return found


def through_kernels(target: Target) -> tuple[mx.array, Run]:
    target.use_kernels("on")
    with emulated() as run:
        return logits(target), run


def products(run: Run) -> int:
    return sum(counters.kernel.startswith("verify_qmm") for counters in run.counters)


def bytes_of(target: Target) -> int:
    return sum(array.nbytes for _, array in target.parameters())


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # the second with a bias
@pytest.mark.parametrize("bits", [4, 8])
def test_queries_keys_and_values_are_one_product_and_so_are_gate_and_up(name, bits):
    target = make_target(name, bits)
    stock, size = logits(target), bytes_of(target)
    ours, run = through_kernels(target)
    assert products(run) == 4 * target.num_layers + 1
    assert mx.abs(ours - stock).max().item() < 1e-4
    assert bytes_of(target) == size
    assert any(case.startswith("shared_input/9/") for case in target.kernels.choices)
    target.use_kernels("off")
    assert mx.array_equal(logits(target), stock)  # the weights are views, and the same


def test_weights_are_stored_once_and_the_modules_see_them():
    target = make_target()
    attention = target.model.layers[0].self_attn
    through_kernels(target)
    before = mx.get_active_memory()
    parts = [m["weight"] for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
    mx.eval([part + 0 for part in parts])
    places = [memoryview(part) for part in parts]  # type: ignore[arg-type]
    starts = [np.asarray(place).ctypes.data for place in places]
    assert starts[1] - starts[0] == parts[0].nbytes and starts[2] - starts[1] == parts[1].nbytes
    assert mx.get_active_memory() <= before + sum(part.nbytes for part in parts)


def test_a_pass_leaves_nothing_behind_and_a_long_one_goes_alone():
    target = make_target()
    through_kernels(target)
    hooked = target.model.layers[0].self_attn.q_proj
    group = type(hooked).__call__.__closure__[0].cell_contents
    assert group._x is None and group._parts == {}
    with emulated() as run:
        logits(target, mx.arange(40))  # more rows than kernels take
    assert products(run) == 0


@pytest.mark.parametrize("member", ["q_proj", "v_proj", "o_proj"])
def test_weights_that_were_changed_under_the_hooks_count(member):
    target = make_target()
    before, _ = through_kernels(target)
    module = target.model.layers[0].self_attn[member]
    module["scales"], module["biases"] = 3 * module["scales"], 3 * module["biases"]
    with emulated():
        ours = logits(target)
    target.use_kernels("off")
    assert mx.abs(ours - logits(target)).max().item() < 1e-4
    assert mx.abs(ours - before).max().item() > 1e-2


def test_a_model_of_another_dtype_is_put_side_by_side_again():
    target = make_target()
    through_kernels(target)
    target.model.set_dtype(mx.bfloat16)
    with emulated() as run:
        assert logits(target).dtype == mx.bfloat16
    assert products(run) == 4 * target.num_layers + 1


def test_modules_that_are_not_all_called_go_alone_from_then_on():
    target = make_target()
    target.use_kernels("on")
    attention = target.model.layers[0].self_attn
    x = mx.random.normal((1, 6, 64), key=mx.random.key(0))
    stock = type(attention.q_proj).__mro__[2].__call__(attention.q_proj, x)
    with emulated() as run:
        for _ in range(3):
            assert mx.abs(attention.q_proj(x + 0) - stock).max() < 1e-5
        first = products(run)
        keys = attention.k_proj(x)
        mx.eval(keys)
    assert first == 3 and products(run) == 4
    assert run.counters[0].buffers["y"].size > run.counters[1].buffers["y"].size


def test_members_may_be_called_in_any_order_and_twice():
    target = make_target()
    target.use_kernels("on")
    mlp = target.model.layers[0].mlp
    x = mx.random.normal((1, 6, 64), key=mx.random.key(0))
    with emulated() as run:
        up, gate, again = mlp.up_proj(x), mlp.gate_proj(x), mlp.up_proj(x)
        mx.eval(up, gate, again)
        assert mx.array_equal(up, again) and not mx.array_equal(up, gate)
    assert products(run) == 2


def test_modules_that_are_packed_otherwise_are_no_group():
    def packed(first: Any, second: Any) -> int:
        model = make_model("llama")
        for layer in model.layers:
            for name, how in (("gate_proj", first), ("up_proj", second)):
                layer.mlp[name] = nn.QuantizedLinear.from_linear(layer.mlp[name], **how)
        return sum(len(list(groups_in(module))) for module in model.modules())

    same = {"group_size": 32, "bits": 4}
    assert packed(same, same) == len(make_model("llama").layers)
    assert packed(same, {"group_size": 32, "bits": 8}) == 0
    assert packed(same, {"group_size": 64, "bits": 4}) == 0
    assert packed(*({"group_size": 32, "bits": 4, "mode": "mxfp4"},) * 2) == 0


@pytest.mark.parametrize("group", GROUPS)
def test_the_products_of_both_sides_are_the_same_numbers(group):
    call = arguments(SHARED_INPUT, group=group, depth=2 * group)
    for ours, theirs in zip(together(*call), apart(*call), strict=True):
        assert_close(ours, exact(theirs))


def test_side_by_side_keeps_order_and_numbers():
    _, _, parts, _ = arguments(SHARED_INPUT)
    whole, views = side_by_side(parts)
    for part, view in zip(parts, views, strict=True):
        assert all(mx.array_equal(a, b) for a, b in zip(part, view, strict=True))
    assert mx.array_equal(whole[0], mx.concatenate([part[0] for part in parts]))
