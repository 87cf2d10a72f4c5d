"""Which calls of a loaded model go through kernels: by its own setting, and as before without."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, cache, gpt_oss, llama

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.growth.grow import rank
from dflash_mlx.models.load import load_pair, load_target
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier import routing
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Plans
from kernels_metal.emulator import emulated
from support.families import make_model
from support.hybrids import changed_target, forward, pass_over, through_both
from support.models import write_model

TOKENS = mx.arange(11)[None]
# Head dims that the kernel takes, and what is special about each family.
ROUTED = {
    "llama": {"head_dim": 64},
    "llama_sliding": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},  # windows in some layers only
    "gpt_oss": {"head_dim": 64},  # sinks and windows
    "phi3": {"hidden_size": 256},  # one product for queries, keys and values
}


def make_target(name: str, bits: int | None = None, mode: str = "affine") -> Target:
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, **ROUTED.get(name, {})}
    return changed_target(name, bits, mode, **changes)


@pytest.mark.parametrize("name", ROUTED)
def test_families_attend_through_the_kernel_and_agree_with_stock_mlx(name):
    target = make_target(name)
    assert len(through_both(target).of("cascade_attention")) == target.num_layers
    assert all(choice.kernel for choice in target.kernels.choices.values())


REFUSED = {
    "qwen2": (3, "affine", "the head dim of queries is 16, but must be one of"),
    "gemma2": (3, "affine", "gemma2 computes the attention of some layers itself"),
    "smollm3": (3, "affine", "bits is 3, but must be one of 4, 6, 8"),
    "olmo2": (6, "affine", "group is 32, but must be one of 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_take_is_left_to_stock_mlx_with_the_reason(name):
    bits, mode, reason = REFUSED[name]
    target = make_target(name, bits, mode)
    stock, _ = pass_over(target)
    target.use_kernels("on")
    ours, run = pass_over(target)
    assert run.counters == []
    assert mx.array_equal(ours, stock)
    assert any(choice.reason.startswith(reason) for choice in target.kernels.choices.values())
    assert not any(choice.kernel for choice in target.kernels.choices.values())
    target.use_kernels("off")
    assert target.kernels.choices == {}


PACKED = [("affine", 6, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]


@pytest.mark.parametrize(("mode", "bits", "group"), PACKED)
def test_models_in_other_packings_go_through_the_kernels_with_their_groups(mode, bits, group):
    model = make_model("llama", **ROUTED["llama"], num_attention_heads=4, intermediate_size=128)
    nn.quantize(model, group, bits, mode=mode)
    target = Target(model, 512, "tiny")
    run = through_both(target)
    assert len(run.of("verify_qmm_matrix")) == 4 * target.num_layers + 1
    assert all(choice.kernel for choice in target.kernels.choices.values())


class Drafts(nn.Module):
    """Stands for a draft network, half of it packed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96, bias=True)
        self.second = nn.QuantizedLinear(96, 64, bias=False, group_size=32, bits=8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.second(self.first(x))


@pytest.mark.parametrize("early", [True, False])
def test_a_draft_network_asks_its_target_s_kernels_until_they_are_off(early):
    target, network = make_target("llama"), Drafts()
    kinds = [type(module) for module in network.modules()]
    x = mx.random.normal((1, 9, 64), key=mx.random.key(0))
    stock = network(x)
    if early:
        target.add_drafter(network)
    target.use_kernels("on")
    if not early:
        target.add_drafter(network)
    with emulated() as run:
        assert mx.abs(network(x) - stock).max().item() < 1e-4
        assert len(run.of("verify_qmm_matrix")) == 2
        with target.kernels.paused():
            assert mx.array_equal(network(x), stock)
        assert len(run.counters) == 2
        target.use_kernels("off")
        assert mx.array_equal(network(x), stock)
    assert len(run.counters) == 2 and [type(module) for module in network.modules()] == kinds


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_models_of_half_precision_go_through_every_kernel(dtype):
    target, exact = (make_target("llama", bits=4) for _ in "12")
    for each in (target, exact):
        each.model.set_dtype(dtype)
    exact.model.set_dtype(mx.float32)
    stock, logits = pass_over(target)[0], pass_over(exact)[0]
    target.use_kernels("on")
    ours, run = pass_over(target)
    assert {"cascade_attention", "verify_qmm_matrix"} <= {c.kernel for c in run.counters}
    assert all(choice.kernel for choice in target.kernels.choices.values())
    assert ours.dtype == dtype
    error, stock_error = (mx.abs(found - logits).max().item() for found in (ours, stock))
    assert error < 2 * stock_error


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3_text", 2)])
def test_a_pass_asks_once_for_all_layers_of_a_kind_and_for_what_it_knows_not_at_all(
    monkeypatch, name, kinds
):
    target, asked = make_target(name, bits=4), []
    target.use_kernels("on")
    chosen = target.kernels.chosen

    def spy(operation: Any, *rest: Any) -> Any:
        asked.append(operation.name)
        return chosen(operation, *rest)

    monkeypatch.setattr(target.kernels, "chosen", spy)
    with emulated() as run:
        pass_over(target, run=run)  # the prompt and a tree
        assert {"cascade_attention", "shared_input", "verify_qmm"} == set(asked)
        asked.clear()
        pass_over(target, run=run)
    assert asked == ["cascade_attention"] * 2 * kinds
    assert len(run.of("cascade_attention")) == target.num_layers


def test_off_gives_every_module_its_class_back_and_a_living_cache_follows():
    target = make_target("llama", bits=4)
    target.tap((1,))

    def hooks() -> list[int]:
        return [len(type(module).__mro__) for module in target.model.modules()]

    stock, before = pass_over(target)[0], hooks()  # a tree's pass hooks ropes, and for good
    target.pass_times = target.noise = object()
    target.use_kernels("on")
    assert (target.pass_times, target.noise) == (None, None), "measured with other kernels"
    assert (hooked := hooks()) != before
    target.use_kernels("auto")
    assert hooks() == hooked
    sequence, head = target.new_cache(), target.head()
    assert len(pass_over(target)[1].of("cascade_attention")) == target.num_layers
    target.use_kernels("off")
    assert hooks() == before
    with emulated() as run:
        forward(target, sequence, list(range(11)))
        mx.eval(head(mx.zeros((1, 64))))
    logits, again = pass_over(target)
    assert mx.array_equal(logits, stock)
    assert run.counters == again.counters == []
    assert target.kernels.choices == {}


def test_two_models_of_one_family_have_settings_of_their_own():
    names = [(base, "scaled_dot_product_attention"), (llama, "scaled_dot_product_attention")]
    names += [(gpt_oss, "scaled_dot_product_attention"), (mx.fast, "scaled_dot_product_attention")]
    names += [(mx, "quantized_matmul"), (llama.Attention, "__call__")]
    names += [(nn.QuantizedLinear, "__call__"), (nn.QuantizedEmbedding, "as_linear")]
    before = [getattr(owner, name) for owner, name in names]
    on, off = (make_target("llama", bits=4) for _ in "12")
    on.use_kernels("on")
    found = {counters.kernel for counters in pass_over(on)[1].counters}
    assert found == {"cascade_attention", "verify_qmm_matrix"}
    assert pass_over(off)[1].counters == []
    assert on.kernels.choices and not off.kernels.choices
    assert [getattr(owner, name) for owner, name in names] == before


def test_mlx_lms_own_caches_still_work_with_a_hooked_model():
    target = make_target("llama", bits=3)  # which no product takes
    stock = target.model(TOKENS, cache=cache.make_prompt_cache(target.model))
    target.use_kernels("on")
    with emulated() as run:
        hooked = target.model(TOKENS, cache=cache.make_prompt_cache(target.model))
        assert mx.array_equal(hooked, stock)
    assert run.counters == []


def test_a_mask_from_elsewhere_is_left_to_stock_mlx():
    target = Target(make_model("llama"), 200, "tiny")
    target.use_kernels("on")
    layer = target.new_cache().layers[0]
    x = mx.random.normal((1, 2, 4, 64), key=mx.random.key(0))
    mask = mx.random.normal((4, 4), key=mx.random.key(1))
    stock = mx.fast.scaled_dot_product_attention(x, x, x, scale=0.1, mask=mask)
    with emulated() as run:
        layer.begin(Block(4), Plans(target.kernels))
        assert mx.array_equal(layer.attend(x, x, x, scale=0.1, mask=mask), stock)
    assert run.counters == []
    (choice,) = target.kernels.choices.values()
    assert choice.reason == "some layers make masks of their own"


# Without anything that runs kernels


@pytest.fixture
def no_metal(monkeypatch):
    """As on Linux."""
    monkeypatch.setattr(routing, "executor", lambda: None)


@pytest.mark.usefixtures("no_metal")
@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("bits", [None, 4])
def test_without_metal_a_pass_gives_what_it_gives_with_kernels_off(mode, bits):
    target = make_target("llama_sliding", bits)
    stock, _ = pass_over(target)
    target.use_kernels(mode)
    ours, run = pass_over(target)
    assert mx.array_equal(ours, stock) and run.counters == []
    assert target.kernels.choices == {}


@pytest.mark.usefixtures("no_metal")
def test_without_metal_draft_networks_and_matrices_that_are_not_packed_stay_as_they_are():
    target, network = make_target("llama"), Drafts()
    target.add_drafter(network)
    target.use_kernels("auto")
    linear = [m for m in [*target.model.modules(), network.first] if isinstance(m, nn.Linear)]
    assert len(linear) > 7 and {type(module) for module in linear} == {nn.Linear}
    assert type(network.second) is nn.QuantizedLinear


@pytest.mark.usefixtures("no_metal")
def test_without_metal_ranking_stays_on_the_host(monkeypatch):
    monkeypatch.setattr(cpu_math, "applies", lambda: True)
    target = make_target("llama")
    target.use_kernels("on")
    logits = mx.random.normal((4, 50), key=mx.random.key(0))
    monkeypatch.setattr(mx, "argpartition", None)  # MLX's, which the host does without
    found, expected = rank(logits, 5, target.kernels), rank(logits, 5)
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.logprobs, expected.logprobs)


# The setting.


def test_the_setting_is_checked_when_made():
    assert PairConfig().kernels == "auto"
    with pytest.raises(DFlashError, match="kernels is 'fast'; choose one of auto, off, on"):
        PairConfig(kernels="fast")
    with pytest.raises(ValueError, match="kernels is 'fast'"):
        Target(make_model("llama"), 9, "tiny").use_kernels("fast")  # type: ignore[arg-type]


def test_a_pair_is_loaded_with_its_setting_and_a_target_for_training_without_kernels(tmp_path):
    folder = str(write_model(tmp_path))
    for mode in ("auto", "off", "on"):
        assert load_pair(PairConfig(folder, kernels=mode)).target.kernels.mode == mode
    assert load_target(folder).target.kernels.mode == "off"
