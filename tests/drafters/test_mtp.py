"""Heads for multi-token prediction: their variants, their folders, and answers of pairs with them.

That their logits are the reference's, whatever their context, is in test_network.py.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.autoregressive import Chain, GrownTree
from dflash_mlx.drafters.mtp.checkpoint import FILES, our_config
from dflash_mlx.models.check import check_drafter, check_pair, describe_target
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import LayerCache
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache
from kernels_metal.emulator import emulated
from support import mtp_targets, reference_mtp
from support.decoding import open_with, start
from support.drafting import CASES, TOLERANCE, Heads, difference, drafted_tree
from support.families import FAMILIES, VOCAB_SIZE, make_model
from support.models import edit_config
from support.mtp_targets import write_split
from support.recurrent_families import RECURRENT
from support.reference_dflash import write_drafter_folder
from support.reference_mtp import (
    FORMATS,
    LLAMA,
    MOE,
    NEXT,
    QWEN,
    UNTOLD,
    USUAL,
    case,
    inside,
    ours,
    random_head,
    split,
    switched,
    target,
)
from support.toys import prompt_of

DRAFT = 7, 4  # the anchor, and how many rows are drafted


@pytest.fixture
def made(tmp_path) -> Any:
    """made(config, tensors): a drafter of a tiny llama."""

    def get(raw: dict[str, Any], tensors: Any, **settings: Any) -> Heads:
        return Heads(tmp_path / "drafter", raw, tensors, **settings)

    return get


# The network


@pytest.mark.parametrize("name", [name for name in FORMATS if "ours" not in name])
@pytest.mark.parametrize("field", USUAL)
def test_a_published_head_is_read_with_the_variant_of_its_kind(drafting, name, field):
    """The reference without that choice is far from it."""
    subject = drafting(f"mtp, {name}")
    text, raw = subject.text(9), subject.raw
    context = subject.context(text)
    assert subject.error(context, text, *DRAFT) < TOLERANCE
    subject.raw = {**raw, field: not USUAL[field]}
    assert subject.error(context, text, *DRAFT) > 100 * TOLERANCE
    subject.raw = raw


WRONG = {  # tensors whose use the reference is told wrongly
    "gates of attention": "layers.0.self_attn.q_proj.weight",
    "norms of keys": "layers.0.self_attn.k_norm.weight",
    "norm of the embedding": "pre_fc_norm_embedding.weight",
    "shared expert": "layers.0.mlp.shared_expert_gate.weight",
    "router": "layers.0.mlp.gate.weight",
}


@pytest.mark.parametrize("what", WRONG)
def test_the_reference_notices_each_part_of_the_layer(drafting, what):
    subject = drafting("mtp, qwen3_5_moe")
    text, tensors, name = subject.text(9), subject.tensors, f"mtp.{WRONG[what]}"
    context = subject.context(text)
    other = tensors[name][::-1] if tensors[name].shape[0] > 1 else -tensors[name]
    subject.tensors = {**tensors, name: other}
    assert subject.error(context, text, *DRAFT) > 10 * TOLERANCE
    subject.tensors = tensors


@pytest.mark.parametrize("name", ["ours", "ours, all variants", "qwen3_5", "qwen3_5_moe"])
def test_every_node_of_a_tree_has_the_logits_of_the_reference(drafting, name):
    subject = drafting(f"mtp, {name}")
    text = subject.text(9)
    for path, found in drafted_tree(subject.model.begin(subject.state(7, text)), 7):
        assert difference(found, subject.after(text, path)) < TOLERANCE


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3_moe", "phi3", "olmo2", "glm4", "granite", "smollm3", "lfm2"]
)
def test_a_layer_of_any_kind_says_behind_its_cache_what_it_says_of_the_whole(family):
    """As training has it, in one pass over all rows."""
    config = FILES.parse_config(our_config({**FAMILIES, **RECURRENT}[family]), family)
    network = FILES.build(config, family)
    x, h = mx.random.normal((2, 9, 64), key=mx.random.key(1))
    cache = SequenceCache([LayerCache(window) for window in config.layer_windows])
    network.append(x[:5], h[:5], cache)
    network.append(x[5:8], h[5:8], cache)
    cache.begin(Block(1))
    step = network.step(x[8:], h[8:], cache)
    whole = network(x[None], h[None], "causal", None)
    for found, expected in zip(step, whole, strict=True):
        np.testing.assert_allclose(found[0], expected[0, -1], atol=TOLERANCE)


def test_trees_through_emulated_kernels_are_those_of_stock_mlx(tmp_path):
    text = {**LLAMA, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Target(make_model("llama"), 512, "tiny")
    subject = Heads(tmp_path, *case(ours(text)), model)
    state, drafters = (
        subject.behind(0, 7),
        (Chain(subject.model, 4), GrownTree(subject.model, 4, 3, 20)),
    )
    expected = [drafter.draft(state, 9).tree.drafted for drafter in drafters]
    model.use_kernels("on")
    with emulated() as run:
        found = [drafter.draft(state, 9).tree.drafted for drafter in drafters]
    assert found == expected
    assert [counters.kernel for counters in run.counters].count("cascade_attention") == 3 + 3


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "lfm2", "gemma3_text", "nemotron_h"])
def test_the_states_read_are_those_that_the_target_s_own_head_reads(tmp_path, family):
    """So a head that hands them on unchanged has the target's logits."""
    model = Target(make_model(family), 512, family)
    subject = Heads(tmp_path, *FORMATS["ours"], model)
    tokens = mx.array(prompt_of(1, 9))
    logits, features = model.forward(tokens, model.new_cache(), Block(9), subject.model.aux_layers)
    states = subject.model.module.fuse(features)
    np.testing.assert_allclose(model.head()(states), logits, atol=1e-3, rtol=1e-3)


def test_a_prompt_gives_the_head_the_outputs_of_the_target_s_last_layer(tmp_path):
    model = Target(make_model("qwen3_5"), 512, "qwen3_5")
    subject = Heads(tmp_path, *FORMATS["qwen3_5"], model)
    prompt = prompt_of(2, 23)
    state = start(model, Chain(subject.model), prompt, DecodeConfig(prefill_step=5))
    open_with(state, 7)
    _, features = model.forward(mx.array(prompt), model.new_cache(), Block(23), (2,))
    assert subject.model.aux_layers == (2,) and state.context.length == 23
    assert subject.error(state.context, (prompt, np.array(features)), 7, 5) < TOLERANCE


# Folders


def test_a_packed_head_is_read_as_its_tensors_are_packed_each_by_itself(made):
    """As people publish them: some matrices with 4 bits, some with 8, some not at all."""
    head, stored, plain = random_head(QWEN), {}, {}
    for name, array in head.items():
        place, bits = name.removesuffix(".weight"), 4 if "mlp" in name else 8
        plain[name] = stored[name] = array
        if array.ndim > 1 and "k_proj" not in name:
            packed = mx.quantize(mx.array(array), group_size=32, bits=bits)
            parts = zip(("weight", "scales", "biases"), packed, strict=True)
            stored |= {f"{place}.{part}": np.array(value) for part, value in parts}
            plain[name] = np.array(mx.dequantize(*packed, group_size=32, bits=bits))
    quantization = {"group_size": 64, "bits": 4}  # of the target, from whose file it is copied
    subject = made(split(QWEN, quantization=quantization), stored)
    assert subject.model.config.packed["fc"].bits == 8
    assert subject.model.config.packed["layers.0.mlp.up_proj"].bits == 4
    assert "layers.0.self_attn.k_proj" not in subject.model.config.packed
    subject.tensors, text = plain, subject.text(9)
    assert subject.error(subject.context(text), text, *DRAFT) < 10 * TOLERANCE


def test_a_head_in_half_precision_is_read(made, tmp_path):
    raw, head = split(QWEN), random_head(QWEN)
    rounded = {name: mx.array(array).astype(mx.bfloat16) for name, array in head.items()}
    write_drafter_folder(tmp_path / "half", raw, head)
    mx.save_safetensors(str(tmp_path / "half" / "model.safetensors"), rounded)
    assert check_drafter(tmp_path / "half").findings == ()
    drafter = FILES.read_drafter(tmp_path / "half")
    assert drafter.tensors["fc.weight"].dtype == mx.bfloat16


@pytest.mark.parametrize("raw", [target(QWEN), split(QWEN)], ids=["inside", "split"])
@pytest.mark.parametrize("stored", ["as weight - 1", "as they are"])
def test_how_norms_are_stored_their_numbers_tell(made, raw, stored):
    """Converters keep heads either way, in a target's folder and split off."""
    head = random_head(QWEN)
    less = {n.removeprefix("mtp."): a for n, a in inside(head).items() if n.startswith("mtp.")}
    tensors = less if stored == "as weight - 1" else head
    within = {f"mtp.{name}": a for name, a in tensors.items()}
    subject = made(raw, within if "architectures" in raw else tensors)
    subject.tensors, text = head, subject.text(9)
    assert subject.error(subject.context(text), text, *DRAFT) < TOLERANCE


def test_norms_of_which_some_are_stored_as_weight_minus_1_are_refused(made):
    head = inside(random_head(QWEN))
    norm = "mtp.layers.0.input_layernorm.weight", "mtp.layers.0.post_attention_layernorm.weight"
    mixed = {name: array + np.float32(name in norm) for name, array in head.items()}
    with pytest.raises(DFlashError, match="some are stored as weight - 1 and some are not"):
        made(target(QWEN), mixed)


def test_what_is_converted_has_all_that_was_read_in_our_words(made):
    subject = made(target(MOE), inside(random_head(MOE)))
    weights, raw = FILES.read_drafter(subject.folder).converted(None, 8, 32)
    assert raw["architectures"] == ["MTPDraftModel"] and "layout" not in raw
    assert raw["text_config"]["num_experts_per_tok"] == 2
    assert "layers.0.mlp.switch_mlp.up_proj.scales" in weights
    assert "layers.0.mlp.gate.scales" not in weights, "the router stays as it is"
    assert our_config(MOE)["block_size"] == 8


REFUSED = {
    "two heads": ({**QWEN, "mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
    "no head": ({**QWEN, "mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0"),
    "a count that is none": ({**QWEN, "mtp_num_hidden_layers": "1"}, "is '1', not"),
    "another layer": ({**QWEN, "mtp_layer_types": ["linear"]}, "only full attention is"),
    "a flag that is none": ({**QWEN, "mtp_use_dedicated_embeddings": 3}, "not true or false"),
    "an unknown kind": ({**QWEN, "model_type": "qwen9"}, "qwen9', whose heads are not known"),
    "no kind": ({**QWEN, "model_type": 3}, "model_type is 3"),
    "no width": ({k: v for k, v in QWEN.items() if k != "hidden_size"}, "lacks 'hidden_size'"),
    "another activation": ({**QWEN, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "an epsilon of 0": ({**QWEN, "rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "a rope that is none": ({**QWEN, "rope_parameters": [1]}, "the layer that"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_is_not_known_is_refused_before_weights_are_read(tmp_path, case):
    text, said = REFUSED[case]
    folder = write_drafter_folder(tmp_path, split(text), random_head(QWEN))
    assert said in check_drafter(folder).errors[0].what


def test_a_head_of_ours_whose_layer_mlx_lm_lacks_is_refused(tmp_path):
    folder = write_drafter_folder(tmp_path, ours({**LLAMA, "model_type": "qwen9"}), {})
    assert "Model type qwen9 not supported" in check_drafter(folder).errors[0].what


PLACES = {
    "ours": lambda **new: ours(**new),
    "the target's part of ours": lambda **new: ours({**LLAMA, **new}),
    "split": lambda **new: split(QWEN, **new),
    "the target's part of a split one": lambda **new: split({**QWEN, **new}),
    "a target": lambda **new: target({**QWEN, **new}),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_field_about_heads_is_passed_over(place):
    raw = PLACES[place](mtp_gain=2)
    with pytest.raises(DFlashError, match=r"mtp_gain is 2, a field that .* does not know"):
        FILES.parse_config(raw, "D")
    assert "mtp_gain" in FILES.parse_config(PLACES[place](mtp_gain=None), "D").notes[0]


def test_a_field_of_a_split_folder_that_nobody_knows_is_refused(tmp_path):
    write_drafter_folder(tmp_path, split(QWEN, mtp_gain=2), random_head(QWEN))
    assert "mtp_gain is 2, a field that this program does not know" in str(
        check_drafter(tmp_path).errors
    )
    edit_config(tmp_path, mtp_gain=None)
    assert check_drafter(tmp_path).findings == ()


TENSORS = {
    "missing": (lambda head: head.pop("fc.weight"), "tensor fc.weight .* is missing"),
    "of another shape": (
        lambda head: head.update({"fc.weight": np.zeros((64, 64), np.float32)}),
        r"tensor fc.weight .* is \(64, 64\)",
    ),
    "unexpected": (
        lambda head: head.update({"fd.weight": np.zeros(3, np.float32)}),
        "tensor fd.weight .* no such tensor",
    ),
    "an embedding that is missing": (
        lambda head: head.update({"lm_head.weight": np.zeros((97, 64), np.float32)}),
        "tensor embed_tokens.weight .* is missing",
    ),
    "an expert that is missing": (
        lambda head: head.pop("layers.0.mlp.experts.1.up_proj.weight"),
        "expert 1 of layers.0.mlp.switch_mlp.up_proj.weight is missing",
    ),
    "blocks of FP8": (
        lambda head: head.update({"fc.weight_scale_inv": np.ones((1, 1), np.float32)}),
        "stored in blocks of FP8",
    ),
    "packed without biases": (
        lambda head: head.update({"fc.scales": np.zeros((64, 4), np.uint8)}),
        "fc is packed in a way that is not MLX's affine one",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, case):
    change, said = TENSORS[case]
    head = dict(random_head(NEXT, fused=False))
    change(head)
    text = {**NEXT, "mtp_use_dedicated_embeddings": "embedding" in case}
    write_drafter_folder(tmp_path, split(text), head)
    with pytest.raises(DFlashError, match=said):
        check_drafter(tmp_path).raise_first()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "hidden_size 64, but T has 32"),
        ({"vocab_size": 98}, "vocab_size 97, but T has 98"),
        ({"num_hidden_layers": 5}, "number of target layers 3, but T has 5"),
        ({"model_type": "qwen3_next"}, "model_type qwen3_5, but T has qwen3_next"),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_values(tmp_path, changes, said):
    head = check_drafter(write_split(tmp_path), "D")
    has = {**QWEN, "model_type": "qwen3_5_text"}
    assert check_pair(describe_target(has, "T"), head).errors == ()
    (found,) = check_pair(describe_target({**has, **changes}, "T"), head).errors
    assert said in found.what and "--drafter" in found.next_step


@pytest.mark.parametrize(
    ("raw", "reads"),
    [
        (target(QWEN), True),
        (NEXT, True),
        (UNTOLD, True),
        (LLAMA, False),
        ({**QWEN, "model_type": 5}, False),
        ({**QWEN, "mtp_num_hidden_layers": None}, False),
        ({**NEXT, "mtp_num_hidden_layers": 0}, False),
    ],
)
def test_a_target_s_configuration_tells_whether_it_may_have_a_head(raw, reads):
    assert FILES.reads_target(raw) == reads


def test_experts_as_mlx_lm_has_them_are_the_same_head(drafting):
    subject, other = drafting("mtp, qwen3_5_moe"), drafting("mtp, qwen3_5_moe, split")
    assert "layers.0.mlp.switch_mlp.up_proj.weight" in switched(random_head(MOE))
    text = subject.text(9)
    ours_, theirs = (each.found(each.context(text), *DRAFT) for each in (subject, other))
    assert difference(ours_, theirs) < TOLERANCE


def test_all_formats_are_drafted_with():
    assert {name for name in CASES if name.startswith("mtp, ")} == {f"mtp, {n}" for n in FORMATS}
    assert ours()["block_size"] == 6 and reference_mtp.VOCAB_SIZE == VOCAB_SIZE
    assert mtp_targets.config()["mtp_num_hidden_layers"] == 1
