"""Fused steps: which modules have calls of their own, what these give, and when stock ones run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import models

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.fusion import (
    GATED_MLPS,
    NORMED_ATTENTIONS,
    is_gated_mlp,
    is_normed_attention,
)
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import Rows, SequenceCache
from kernels_metal.emulator import Run, emulated
from support.decoding import ids_of, tree_of
from support.families import FAMILIES, VOCAB_SIZE, make_model

TREE = tree_of([3, 1, 4, 1, 5, 9], [-1, 0, 0, 1, 2, 2])
PROMPT = mx.arange(11)
SHAPE = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def make_target(
    monkeypatch: pytest.MonkeyPatch, name: str, bits: int | None = 4, **changes: Any
) -> Target:
    monkeypatch.setitem(FAMILIES, name, {**FAMILIES[name], **SHAPE, **changes})
    model = make_model(name)
    for i, (path, norm) in enumerate(model.named_modules()):
        if path.endswith(("q_norm", "k_norm")):
            norm.weight = 1 + 0.3 * mx.random.normal(norm.weight.shape, key=mx.random.key(i))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    return Target(model, 200, name)


def after_the_prompt(target: Target) -> SequenceCache:
    sequence = target.new_cache()
    target.forward(PROMPT, sequence, Block(len(PROMPT)))
    sequence.commit(range(len(PROMPT)))
    return sequence


def pass_over(target: Target, rows: mx.array, block: Block) -> tuple[mx.array, Run]:
    """Logits behind the prompt, and what ran in the emulator for this pass alone."""
    with emulated():
        sequence = after_the_prompt(target)
        mx.eval([array for layer in sequence.layers for array in layer.arrays])
    with emulated() as run:
        logits, _ = target.forward(rows, sequence, block)
        mx.eval(logits)
    return logits, run


BLOCKS = {
    "one": (mx.array([5]), Block(1)),
    "chain": (mx.array([5, 6, 7]), Block(3)),
    "tree": (ids_of(TREE), Block.of(TREE)),
    "last": (mx.arange(9), Block(9, last_only=True)),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_norms_and_rope_are_one_launch_and_agree_with_stock_mlx(monkeypatch, name, block):
    target = make_target(monkeypatch, name)
    stock, _ = pass_over(target, *BLOCKS[block])
    target.use_kernels("on")
    ours, run = pass_over(target, *BLOCKS[block])
    assert len(run.of("norm_rope")) == target.num_layers
    assert mx.abs(ours - stock).max().item() < 2e-4


def test_weights_that_are_not_quantised_are_normed_and_turned_too(monkeypatch):
    target = make_target(monkeypatch, "qwen3", bits=None)
    stock, _ = pass_over(target, *BLOCKS["tree"])
    target.use_kernels("on")
    ours, run = pass_over(target, *BLOCKS["tree"])
    assert len(run.of("norm_rope")) == target.num_layers
    assert mx.abs(ours - stock).max().item() < 2e-4


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gate_and_up_are_one_product_that_is_gated_at_once(monkeypatch, name):
    target = make_target(monkeypatch, name)
    stock, _ = pass_over(target, *BLOCKS["chain"])
    target.use_kernels("on")
    ours, run = pass_over(target, *BLOCKS["chain"])
    products = [c for c in run.counters if c.kernel.startswith("verify_qmm")]
    sizes = [c.buffers["y"].size // 4 // 3 for c in products]
    inner = target.model.layers[0].mlp.gate_proj["weight"].shape[0]
    assert sizes.count(inner) == target.num_layers and 2 * inner not in sizes
    assert any("x2/4/" in case for case in target.kernels.choices)  # a case of its own
    assert mx.abs(ours - stock).max().item() < 2e-4


def test_sequences_side_by_side_are_normed_together_and_attend_alone(monkeypatch):
    target = make_target(monkeypatch, "qwen3")
    target.use_kernels("on")
    with emulated() as run:
        assert target.joins
        rows = [(mx.array([5, 6]), after_the_prompt(target), Block(2))]
        rows += [(ids_of(TREE), after_the_prompt(target), Block.of(TREE))]
        before = len(run.of("norm_rope"))
        found = target.forward_all([Rows(*each) for each in rows])
        mx.eval([logits for logits, _ in found])
        assert len(run.of("norm_rope")) == before + target.num_layers
    target.use_kernels("off")
    for (tokens, _, block), (logits, _) in zip(rows, found, strict=True):
        alone, _ = target.forward(tokens, after_the_prompt(target), block)
        assert mx.abs(alone - logits).max().item() < 2e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 16},  # which the kernel does not take
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_other_heads_and_scaled_positions(monkeypatch, changes):
    target = make_target(monkeypatch, "qwen3", **changes)
    stock, _ = pass_over(target, *BLOCKS["tree"])
    target.use_kernels("on")
    ours, run = pass_over(target, *BLOCKS["tree"])
    taken = 0 if "head_dim" in changes else target.num_layers
    assert len(run.of("norm_rope")) == taken
    assert mx.abs(ours - stock).max().item() < 2e-4


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_norms_that_were_changed_under_the_hooks_count(monkeypatch, which):
    target = make_target(monkeypatch, "qwen3")
    target.use_kernels("on")
    before, _ = pass_over(target, *BLOCKS["chain"])
    norm = target.model.layers[0].self_attn[which]
    norm.weight = 3 * norm.weight
    ours, _ = pass_over(target, *BLOCKS["chain"])
    target.use_kernels("off")
    stock, _ = pass_over(target, *BLOCKS["chain"])
    assert mx.abs(ours - stock).max().item() < 2e-4
    assert mx.abs(ours - before).max().item() > 1e-2


def test_a_prompt_and_a_batch_take_the_stock_steps(monkeypatch):
    target, prompt = make_target(monkeypatch, "qwen3"), mx.arange(100) % VOCAB_SIZE
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


def test_modules_with_calls_of_their_own_are_those_that_mlx_lm_writes_as_qwen3s():
    files = sorted(Path(models.__path__[0]).glob("*.py"))
    calls = {name: call for file in files for name, call in calls_in(file).items()}
    for known, like in ((GATED_MLPS, "qwen3.MLP"), (NORMED_ATTENTIONS, "qwen3.Attention")):
        assert known == {name for name, call in calls.items() if call == calls[like]}
    for family in {name.partition(".")[0] for name in GATED_MLPS}:
        source = (files[0].parent / f"{family}.py").read_text()
        assert re.search(r"from (mlx_lm\.models)?\.activations import .*\bswiglu\b", source), family


def test_modules_are_known_by_where_their_call_is_written():
    def known(name: str) -> tuple[int, int]:
        modules = make_model(name).modules()
        return sum(map(is_gated_mlp, modules)), sum(map(is_normed_attention, modules))

    layers = len(make_model("qwen3").layers)
    assert known("qwen3") == (layers, layers)
    assert known("llama") == (layers, 0)
    assert known("gemma3_text") == (0, 0)  # gelu, and other norms
