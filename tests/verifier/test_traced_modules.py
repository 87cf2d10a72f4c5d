"""Routers, experts and MLPs that are traced: the same bits as by their own calls, and when not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import dbrx, qwen3_moe, switch_layers
from mlx_lm.tuner.lora import LoRALinear

from dflash_mlx.verifier import segments
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.segments import Settled, _only_computes
from kernels_metal.emulator import Run, emulated
from support.decoding import ids_of
from support.hybrids import changed_target, fresh, some_tree
from support.overrides import override
from support.stand_ins import stand_ins

SIZES = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {  # by family: whose settings it has, and more
    "qwen3_moe": ("qwen3_moe", SIZES),
    "qwen2_moe": ("qwen3_moe", {"shared_expert_intermediate_size": 64}),
    "deepseek_v3": (
        "deepseek_v3",
        {"q_lora_rank": 32, "qk_nope_head_dim": 32, "n_group": 2, "topk_group": 1},
    ),
    "glm4_moe": (
        "deepseek_v3",
        {**SIZES, "use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
        | {"n_group": 2, "topk_group": 1, "partial_rotary_factor": 0.5}
        | {"rope_scaling": None, "attention_bias": False},
    ),
}
TREE = some_tree(np.random.default_rng(5), 12)
CHAIN = mx.arange(3, 7), Block(4)
SORTED = 32  # rows that have 64 experts, which mlx-lm sorts
PASSES = (
    *((mx.arange(3, 3 + rows), Block(rows)) for rows in (1, 4, SORTED)),
    (ids_of(TREE), Block.of(TREE)),
)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Unlike elsewhere in this room."""
    mx.enable_compile()
    yield
    mx.disable_compile()


def make_target(family: str = "qwen3_moe", **changes: Any) -> Target:
    like, more = OF_EXPERTS.get(family, (family, {}))
    target = changed_target(like, 4, **{**more, "model_type": family, **changes})
    target.use_kernels("on")
    return target


def logits(target: Target, tokens: mx.array = CHAIN[0], block: Block = CHAIN[1]) -> mx.array:
    found, _ = target.forward(tokens, fresh(target, [*range(11)]), block)
    mx.eval(found)
    return found


def by_own_calls(target: Target, work: Callable[[], Any]) -> Any:
    """With kernels, but no layer that is replayed."""
    segments = target._kernel_hooks.segments
    layers, segments.layers = segments.layers, []
    try:
        return work()
    finally:
        segments.layers = layers


def traced(target: Target) -> list[int]:
    """In how many layers what is behind attention is, by widths of passes."""
    made = target._kernel_hooks.segments._plans._made.values()
    settled = [found.entries for found in made if isinstance(found, Settled)]
    return [sum(entry is not None and entry.then is None for entry in each) for each in settled]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("family", [*OF_EXPERTS, "qwen3_next", "phi3"])
def test_what_is_traced_gives_the_bits_of_its_own_calls_at_every_width(family, dtype):
    target = make_target(family)
    target.model.set_dtype(dtype)
    with stand_ins():
        found = [[logits(target, *rows) for rows in PASSES] for _ in range(3)][-1]
        widths = [n for n in traced(target) if n == target.num_layers]
        own = by_own_calls(target, lambda: [logits(target, *rows) for rows in PASSES])
    # As many rows as are sorted are too many for the product of a dense MLP that is gated
    assert len(widths) >= len(PASSES) - (family not in ("qwen3_moe", "phi3"))
    assert all(mx.array_equal(a, b) for a, b in zip(found, own, strict=True))


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_by_emulated_kernels_the_bits_and_the_launches_are_those_of_own_calls(family):
    target = make_target(family)
    assert len(same_launches(target)) > 2 * target.num_layers
    assert traced(target)[-1] == target.num_layers


def same_launches(target: Target) -> list[str]:
    """What a pass launches, which is what it does by own calls."""

    def launches(run: Run) -> tuple[mx.array, list[str]]:
        run.counters.clear()
        return logits(target), sorted(counter.kernel for counter in run.counters)

    with emulated() as run:
        logits(target)
        found, ours = launches(run)
        own, theirs = by_own_calls(target, lambda: launches(run))
    assert mx.array_equal(found, own) and ours == theirs
    return ours


class Flat(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Its products get rows without a batch."""

    def __call__(self, x):
        return super().__call__(x[0])[None]


def test_products_of_rows_in_another_shape_stay_with_their_kernels(monkeypatch):
    monkeypatch.setattr(Flat.__call__, "__module__", "mlx_lm.models.qwen3_moe")
    target = make_target()
    target.model.layers[1].mlp.__class__ = Flat
    same_launches(target)
    assert traced(target)[-1] == target.num_layers - 1


def test_products_with_a_bias_keep_it():
    target = make_target("starcoder2")
    same_launches(target)
    assert target.model.layers[0].mlp.c_fc.bias.size


def test_layers_share_a_trace_only_where_they_are_set_alike():
    target = make_target(num_hidden_layers=4)
    target.model.layers[2].mlp.top_k = 3
    with stand_ins():
        found = [logits(target) for _ in range(3)][-1]
        assert traced(target)[-1] == 4
        own = by_own_calls(target, lambda: logits(target))
        target.model.layers[2].mlp.top_k = 2
        others = by_own_calls(target, lambda: logits(target))
    assert mx.array_equal(found, own) and mx.abs(found - others).max() > 1e-2


def change(mlp: Any, what: str) -> None:
    """A weight, a module or code in an MLP of experts."""
    if what == "LoRA":
        mlp.gate = LoRALinear.from_base(mlp.gate, r=4, scale=20.0)
        mlp.gate.lora_b = mx.random.normal(mlp.gate.lora_b.shape)
    elif what == "activation":
        mlp.switch_mlp.activation = DoubleSwiGLU()
    elif what == "experts":
        mlp.switch_mlp = switch_layers.SwitchGLU(64, 32, 4)
    else:
        module = mlp.gate if what == "gate" else mlp.switch_mlp[what]
        module.scales, module.biases = 3 * module.scales, 3 * module.biases


class DoubleSwiGLU(switch_layers.SwiGLU):
    """One that nobody knows."""

    def __call__(self, x, gate):
        return 2 * super().__call__(x, gate)


@pytest.mark.parametrize("what", ["gate", "up_proj", "down_proj", "experts", "activation", "LoRA"])
def test_what_is_replaced_in_an_mlp_of_experts_counts_from_the_next_pass_on(what):
    target = make_target()
    with stand_ins():
        before = [logits(target) for _ in range(3)][-1]
        change(target.model.layers[1].mlp, what)
        found = [logits(target) for _ in range(3)]
        assert traced(target)[-1] == target.num_layers - (what in ("activation", "LoRA"))
        own = by_own_calls(target, lambda: logits(target))
    assert all(mx.array_equal(each, own) for each in found)
    assert mx.abs(own - before).max() > 1e-2


@pytest.mark.parametrize("name", ["gate", "switch_mlp", "activation"])
def test_a_hook_inside_of_experts_is_called_in_every_pass(name):
    target, seen = make_target(), []
    mlp = target.model.layers[1].mlp
    mlp.switch_mlp.activation = switch_layers.SwiGLU()  # in mlx-lm one for all models
    module = mlp.switch_mlp.activation if name == "activation" else mlp[name]
    override(module, lambda m, call, *given: seen.append(1) or call(m, *given))
    with stand_ins():
        for _ in range(3):
            logits(target)
        assert traced(target)[-1] < target.num_layers
        seen.clear()
        logits(target)
    assert seen


class Counting(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Keeps how often it was called."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


def test_code_of_mlx_lm_that_keeps_something_is_not_traced(monkeypatch):
    monkeypatch.setattr(Counting.__call__, "__module__", "mlx_lm.models.qwen3_moe")
    target = make_target()
    mlp = target.model.layers[1].mlp
    mlp.__class__ = Counting
    with stand_ins():
        for _ in range(3):
            logits(target)
        calls = mlp.calls
        logits(target)
        assert traced(target)[-1] == target.num_layers - 1
    assert mlp.calls == calls + 2  # the prompt's pass, and this one


STOCK = qwen3_moe.Qwen3MoeSparseMoeBlock.__call__
wrapped_calls: list[int] = []


@wraps(STOCK)
def wrapped(self, x):
    wrapped_calls.append(1)
    return STOCK(self, x)


def test_a_function_that_wraps_mlx_lm_s_is_not_taken_for_it():
    target = make_target()
    mlp = target.model.layers[1].mlp
    mlp.__class__ = type("Wrapped", (type(mlp),), {"__call__": wrapped})
    with stand_ins():
        for _ in range(3):
            logits(target)
        wrapped_calls.clear()
        logits(target)
        assert traced(target)[-1] == target.num_layers - 1
    assert len(wrapped_calls) == 2  # the prompt's pass, and this one


@pytest.mark.parametrize("name", ["top_k", "config"])
def test_a_setting_of_an_mlp_counts_from_the_next_pass_on(name):
    target = make_target("qwen3_moe" if name == "top_k" else "glm4_moe")
    with stand_ins():
        before = [logits(target) for _ in range(3)][-1]
        for layer in target.model.layers:
            if name == "top_k":
                layer.mlp.top_k = 4
            elif "switch_mlp" in layer.mlp:
                layer.mlp.config.n_shared_experts = None
        found = [logits(target) for _ in range(3)]
        own = by_own_calls(target, lambda: logits(target))
    assert all(mx.array_equal(each, own) for each in found)
    assert mx.abs(own - before).max() > 1e-2


def test_a_hook_on_an_activation_that_comes_later_is_called():
    target, seen = make_target(), []
    mlp = target.model.layers[1].mlp
    mlp.switch_mlp.activation = switch_layers.SwiGLU()  # which holds no arrays
    with stand_ins():
        for _ in range(3):
            logits(target)
        assert traced(target)[-1] == target.num_layers
        override(mlp.switch_mlp.activation, lambda m, call, *x: seen.append(1) or call(m, *x))
        for _ in range(3):
            logits(target)
    assert len(seen) == 6


class AskingForValues(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Without a word that says so."""

    def __call__(self, x):
        return super().__call__(x) if mx.any(x > 1e9) else super().__call__(x) * 2


class AskingForParts(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """A part has more than a call."""

    def __call__(self, x):
        return super().__call__(x) * self.gate.weight.ndim


@pytest.mark.parametrize("kind", [AskingForValues, AskingForParts])
def test_code_that_no_graph_can_be_made_of_is_called_as_it_is(kind, monkeypatch):
    monkeypatch.setattr(kind.__call__, "__module__", "mlx_lm.models.qwen3_moe")
    target = make_target()
    target.model.layers[1].mlp.__class__ = kind
    with stand_ins():
        found = [logits(target) for _ in range(3)][-1]
        assert traced(target)[-1] == target.num_layers - 1
        own = by_own_calls(target, lambda: logits(target))
    assert mx.array_equal(found, own)


class Inside(nn.Module):
    """A module whose `__call__` leaves the work to inner functions or to methods of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __call__(self, x):
        return [each.item() for each in x]


class ByMethod(Inside):
    def _keep(self, x):
        self.last = x

    def __call__(self, x):
        self._keep(x)
        return x


class ByParent(ByMethod):
    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.parametrize("kind", [Inside, ByMethod, ByParent])
def test_code_is_looked_for_where_it_is(kind, monkeypatch):
    for function in (Inside.__call__, ByMethod._keep, ByMethod.__call__, ByParent.__call__):
        monkeypatch.setattr(function, "__module__", "mlx_lm.models.qwen3_moe")
    assert segments._own(kind("so"), kind, ((1, 4), mx.float32)) is None


def test_code_that_asks_for_values_or_chance_or_is_by_others_is_not_traced():
    def allowed(kind: Any) -> bool:
        return _only_computes(kind.__call__.__code__, kind.__call__.__module__)

    assert all(map(allowed, (nn.RMSNorm, switch_layers.SwitchGLU)))
    assert not any(map(allowed, (dbrx.SparseMoeBlock, nn.Dropout, nn.BatchNorm, DoubleSwiGLU)))


def arrays_in(value: Any) -> int:
    """Those that a function's closure reaches, through functions, modules and containers."""
    if isinstance(value, mx.array):
        return 1
    if isinstance(value, FunctionType):
        return sum(arrays_in(cell.cell_contents) for cell in value.__closure__ or ())
    inside = [*value.values()] if isinstance(value, dict) else []
    inside += [*value] if isinstance(value, list | tuple) else []
    inside += [*vars(value).values()] if isinstance(value, nn.Module) else []
    return sum(map(arrays_in, inside))


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_what_is_traced_holds_no_weights(family, monkeypatch):
    functions: list[Any] = []
    compile_it = mx.compile

    def noted(function: Any, **how: Any) -> Any:
        functions.extend([function] if function.__module__ == segments.__name__ else [])
        return compile_it(function, **how)

    monkeypatch.setattr(mx, "compile", noted)
    target = make_target(family)
    with stand_ins():
        for _ in range(3):
            logits(target)
    assert functions and not any(map(arrays_in, functions))
    assert arrays_in(target.model.layers[0].mlp)
