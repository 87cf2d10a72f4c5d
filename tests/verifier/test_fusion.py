"""Fused steps: which modules have calls of their own, what these give, and when stock ones run."""

from __future__ import annotations

import ast
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import models
from mlx_lm.models import llama

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.fusion import (
    GATED_ATTENTION,
    GATED_MLPS,
    groups_in,
    is_normed_attention,
    written_as,
)
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.segments import BLOCKS as LAYERS
from dflash_mlx.verifier.sequence import Rows
from kernels_metal.emulator import Run, emulated
from kernels_metal.shared_input import SHARED_INPUT, apart, together
from kernels_metal.verify_qmm import GROUPS
from support.families import VOCAB_SIZE, make_model
from support.hybrids import BLOCKS, PROMPT, changed_target, fresh, pass_over, through_both
from support.kernels import arguments, assert_close, exact

HYBRIDS = "qwen3_5", "qwen3_next"  # of whose three layers one has keys
TURNED = {"type": "default", "rope_theta": 100000, "partial_rotary_factor": 0.25}
QUARTER = {"rope_parameters": TURNED, "partial_rotary_factor": 0.25}
SHAPE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_target(name: str, bits: int | None = 4, **changes: Any) -> Target:
    target = changed_target(name, bits, **{**SHAPE, **changes})
    for i, (path, norm) in enumerate(target.model.named_modules()):
        if path.endswith(("q_norm", "k_norm")):
            norm.weight = 1 + 0.3 * mx.random.normal(norm.weight.shape, key=mx.random.key(i))
    return target


def products(run: Run) -> int:
    return sum(counters.kernel.startswith("verify_qmm") for counters in run.counters)


@pytest.mark.parametrize(
    ("name", "block", "bits", "changes"),
    [
        *(("qwen3", block, 4, {}) for block in ("one", "chain", "tree", "last")),
        ("qwen3_moe", "tree", 4, {}),
        ("qwen3", "tree", None, {}),
        ("qwen3", "tree", 4, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("qwen3", "tree", 4, {"head_dim": 16}),  # which the kernel does not take
        *((name, "tree", 4, QUARTER) for name in ("qwen3_5", "qwen3_next")),  # with gated queries
    ],
)
def test_norms_and_rope_are_one_launch_and_agree_with_stock_mlx(name, block, bits, changes):
    target = make_target(name, bits, **changes)
    taken = 0 if "head_dim" in changes else 1 if name in HYBRIDS else target.num_layers
    assert len(through_both(target, block).of("norm_rope")) == taken


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gate_and_up_are_one_product_that_is_gated_at_once(name):
    target = make_target(name)
    run = through_both(target, "chain")
    launches = [c for c in run.counters if c.kernel.startswith("verify_qmm")]
    sizes = [c.buffers["y"].size // 4 // 3 for c in launches]
    inner = target.model.layers[0].mlp.gate_proj["weight"].shape[0]
    assert sizes.count(inner) == target.num_layers and 2 * inner not in sizes
    assert any("x2/4/" in case for case in target.kernels.choices)  # a case of its own


def test_sequences_side_by_side_are_normed_together_and_attend_alone():
    target = make_target("qwen3")
    target.use_kernels("on")
    blocks = [BLOCKS[name] for name in ("chain", "tree")]
    with emulated() as run:
        assert target.joins
        rows = [Rows(tokens, fresh(target, PROMPT), block) for tokens, block in blocks]
        before = len(run.of("norm_rope"))
        found = target.forward_all(rows)
        mx.eval([logits for logits, _ in found])
        assert len(run.of("norm_rope")) == before + target.num_layers
    target.use_kernels("off")
    for (tokens, block), (logits, _) in zip(blocks, found, strict=True):
        alone, _ = target.forward(tokens, fresh(target, PROMPT), block)
        assert mx.abs(alone - logits).max().item() < 2e-4


@pytest.mark.parametrize("member", ["q_norm", "k_norm", "q_proj", "v_proj", "o_proj"])
def test_weights_that_were_changed_under_the_hooks_count(member):
    target = make_target("qwen3" if member.endswith("norm") else "llama")
    target.use_kernels("on")
    before, _ = pass_over(target, "chain")
    module = target.model.layers[0].self_attn[member]
    for name in ("weight",) if member.endswith("norm") else ("scales", "biases"):
        module[name] = 3 * module[name]
    ours, _ = pass_over(target, "chain")
    target.use_kernels("off")
    stock, _ = pass_over(target, "chain")
    assert mx.abs(ours - stock).max().item() < 2e-4
    assert mx.abs(ours - before).max().item() > 1e-2


def test_a_prompt_and_a_batch_take_the_stock_steps():
    target, prompt = make_target("qwen3"), mx.arange(100) % VOCAB_SIZE
    target.use_kernels("on")
    with emulated() as run:
        logits, _ = target.forward(prompt, target.new_cache(), Block(100))
        batch = target.model(mx.arange(6).reshape(2, 3))
        mx.eval(logits, batch)
    assert run.of("norm_rope") == []
    target.use_kernels("off")
    stock, _ = target.forward(prompt, target.new_cache(), Block(100))
    assert mx.abs(logits - stock).max().item() < 1e-4


def calls_in(file: Path) -> dict[str, str]:
    """The calls of the classes of one of mlx-lm's sources, as trees of Python without types."""
    found = {}
    for kind in ast.parse(file.read_text()).body:
        for call in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(call, ast.FunctionDef) and call.name == "__call__":
                arguments = [argument.arg for argument in call.args.args]
                found[f"{file.stem}.{kind.name}"] = str([arguments, *map(ast.dump, call.body)])
    return found


def test_modules_and_layers_are_known_that_mlx_lm_writes_as_qwen3s_wherever_it_does():
    texts, calls = {}, {}
    for file in sorted(Path(models.__path__[0]).glob("*.py")):
        with suppress(SystemExit):  # a family that asks for another package
            module = import_module(f"{models.__name__}.{file.stem}")
            for name, text in calls_in(file).items():
                texts[name] = text
                calls[name] = getattr(module, name.partition(".")[2]).__call__
    for like in (*GATED_MLPS, "qwen3.Attention", GATED_ATTENTION, *LAYERS):
        known = {name for name, call in calls.items() if written_as(call, like)}
        assert known == {name for name, text in texts.items() if text == texts[like]}, like


def test_the_same_words_are_not_known_where_a_name_means_something_else(monkeypatch):
    assert written_as(llama.MLP.__call__, "qwen3.MLP")
    monkeypatch.setattr(llama, "swiglu", lambda gate, x: x)
    assert not written_as(llama.MLP.__call__, "qwen3.MLP")
    assert not written_as(nn.Module.__call__, "qwen3.MLP")


def test_modules_are_known_by_where_their_call_is_written():
    known = {"qwen3": (3, 3), "qwen3_5": (3, 1), "llama": (3, 0), "gemma3_text": (0, 0)}
    for name, (gated, normed) in known.items():
        modules = make_model(name).modules()
        assert sum(written_as(type(m).__call__, *GATED_MLPS) for m in modules) == gated
        assert sum(map(is_normed_attention, modules)) == normed


# Products of one input as one: what they give, what they keep, and when they go alone


# Products of one input


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # the second with a bias
@pytest.mark.parametrize("bits", [4, 8])
def test_queries_keys_and_values_are_one_product_and_so_are_gate_and_up(name, bits):
    target = changed_target(name, bits)
    (stock, _), parameters = pass_over(target, "nine"), target.parameters()
    run = through_both(target, "nine")
    assert products(run) == 4 * target.num_layers + 1
    sizes = [sum(array.nbytes for _, array in each) for each in (parameters, target.parameters())]
    assert sizes[0] == sizes[1]
    assert any(case.startswith("shared_input/9/") for case in target.kernels.choices)
    target.use_kernels("off")
    assert mx.array_equal(pass_over(target, "nine")[0], stock)  # weights are views, and the same


@pytest.mark.parametrize("block", ["chain", "tree"])  # along whose paths inputs are spread
@pytest.mark.parametrize(("name", "launches"), [("qwen3_5", 3 * 4 + 1), ("qwen3_next", 13 + 6)])
def test_what_a_gated_delta_net_takes_from_its_input_is_one_product(name, launches, block):
    target = make_target(name)  # 2 of 3 layers; qwen3_next's have experts
    (stock, _) = pass_over(target, block)
    through_both(target, block)
    with emulated() as run:
        for _ in range(2):  # what is settled at the first pass of a shape is not counted
            pass_over(target, block, run)
    assert products(run) == launches
    target.use_kernels("off")
    assert mx.array_equal(pass_over(target, block)[0], stock)


def test_weights_are_stored_once_and_the_modules_see_them():
    target = changed_target("llama", 4)
    attention = target.model.layers[0].self_attn
    through_both(target, "nine")
    before = mx.get_active_memory()
    parts = [m["weight"] for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
    mx.eval([part + 0 for part in parts])
    places = [memoryview(part) for part in parts]  # type: ignore[arg-type]
    starts = [np.asarray(place).ctypes.data for place in places]
    assert starts[1] - starts[0] == parts[0].nbytes and starts[2] - starts[1] == parts[1].nbytes
    assert mx.get_active_memory() <= before + sum(part.nbytes for part in parts)


def test_a_pass_leaves_nothing_behind_a_long_one_goes_alone_and_other_dtypes_are_joined_anew():
    target = changed_target("llama", 4)
    through_both(target, "nine")
    hooked = target.model.layers[0].self_attn.q_proj
    group = type(hooked).__call__.__closure__[0].cell_contents
    assert group._x is None and group._parts == {}
    with emulated() as run:  # more rows than kernels take
        mx.eval(target.forward(mx.arange(40), target.new_cache(), Block(40))[0])
    assert products(run) == 0
    target.model.set_dtype(mx.bfloat16)
    logits, run = pass_over(target, "nine")
    assert logits.dtype == mx.bfloat16
    assert products(run) == 4 * target.num_layers + 1


def test_modules_that_are_not_all_called_go_alone_from_then_on():
    target = changed_target("llama", 4)
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
    target = changed_target("llama", 4)
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
    floats = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    assert packed(same, floats) == 0
    assert packed(floats, floats) == packed(same, same)


@pytest.mark.parametrize("group", GROUPS)
def test_the_products_of_both_sides_are_the_same_numbers(group):
    call = arguments(SHARED_INPUT, group=group, depth=2 * group)
    for ours, theirs in zip(together(*call), apart(*call), strict=True):
        assert_close(ours, exact(theirs))
