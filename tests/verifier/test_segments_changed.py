"""Layers that are replayed: what stays outside, and what changes in them counts."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3
from mlx_lm.tuner.lora import LoRALinear

from dflash_mlx.verifier.model import Target
from support.overrides import override
from support.replays import CHAIN, CLOSE, make_target, outputs, replayed, worst
from support.stand_ins import stand_ins


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Unlike elsewhere in this room."""
    mx.enable_compile()
    yield
    mx.disable_compile()


class OwnMLP(qwen3.MLP):
    """One that nobody knows."""

    calls = 0

    def __call__(self, x):
        type(self).calls += 1
        return super().__call__(x) * 2


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


@pytest.mark.parametrize("name", ["eps", "base"])
def test_a_setting_of_a_module_counts_from_the_next_pass_on(name):
    target = make_target()
    target.use_kernels("on")
    with stand_ins():
        before = [outputs(target, *CHAIN, 11) for _ in range(3)][-1]
        layer = target.model.layers[1]
        setattr(layer.input_layernorm if name == "eps" else layer.self_attn.rope, name, 3.0)
        ours = [outputs(target, *CHAIN, 11) for _ in range(3)]
        assert replayed(target) == target.num_layers
        target.use_kernels("off")
        stock = outputs(target, *CHAIN, 11)
    assert all(mx.abs(each - stock).max() < CLOSE for each in ours)
    assert mx.abs(stock - before).max() > 1e-3


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("what", ["input", "output"])
def test_a_hook_may_change_what_is_between_layers_in_its_place(i, what):
    def hook(module, call, x, *others):
        out = x if what == "input" else call(module, x, *others)
        out += 1  # the same object, which has other numbers now
        return call(module, x, *others) if what == "input" else out

    target = make_target()
    target.use_kernels("on")
    override(target.model.layers[i], hook)
    with stand_ins():
        ours = [outputs(target, *CHAIN, 11) for _ in range(3)][-1]
        assert replayed(target) == target.num_layers
        target.use_kernels("off")
        stock = outputs(target, *CHAIN, 11)
    assert mx.abs(ours - stock).max() < CLOSE


def test_layers_that_change_places_get_what_is_theirs():
    target = make_target(num_hidden_layers=4)
    target.use_kernels("on")
    with stand_ins():
        before = [outputs(target, *CHAIN, 11) for _ in range(3)][-1]
        layers = target.model.layers
        layers[1], layers[2] = layers[2], layers[1]
        ours = [outputs(target, *CHAIN, 11) for _ in range(3)]
        with target.kernels.paused():
            stock = outputs(target, *CHAIN, 11)
    assert all(mx.abs(each - stock).max() < CLOSE for each in ours)
    assert mx.abs(stock - before).max() > 1e-3
