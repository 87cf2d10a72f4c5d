"""Heads of GLM, DeepSeek, MiMo and Nemotron-H, in their targets' folders and split off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.core.config import PairConfig
from dflash_mlx.drafters.methods import format_as_drafter
from dflash_mlx.drafters.mtp.checkpoint import FILES
from dflash_mlx.drafters.mtp.published import Unread
from dflash_mlx.drafters.networks.files import read_json
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.verifier.model import Target
from support import published_sizes
from support.drafter_formats import write_shards
from support.drafting import TOLERANCE, PublishedHeads
from support.families import make_model
from support.published_heads import (
    DEEPSEEK,
    FORMATS,
    GLM_LITE,
    DeepSeek,
    Head,
)
from support.published_layouts import as_split, in_eight_bits, write_eight_bits
from support.reference_dflash import Array, write_drafter_folder

VARIANTS = ("hidden_normed", "hidden_first", "feeds_normed")


@pytest.fixture
def subject(tmp_path):
    """Of one format, by its name."""
    return lambda name: PublishedHeads(tmp_path, *FORMATS[name])


def error(subject: Any, model: Any = None) -> float:
    """How far four steps behind nine tokens, told in two parts, are from the reference."""
    text = subject.text(9)
    subject.model = model or subject.model
    return subject.error(subject.context(text, 4, 5), text, 7, 4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_in_its_target_s_folder_drafts_as_its_publisher_s_code(subject, name):
    assert error(subject(name)) < TOLERANCE


@pytest.mark.parametrize("field", VARIANTS)
@pytest.mark.parametrize("name", FORMATS)
def test_no_variant_of_a_head_can_be_read_wrong_unseen(subject, name, field):
    found = subject(name)
    config = FILES.read_drafter(found.folder).config
    other = replace(config, **{field: not getattr(config, field)})
    wrong = FILES.load(found.folder, other, found.target, PairConfig())
    assert error(found, wrong) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["glm", "deepseek", "nemotron"])
def test_which_experts_are_asked_is_told_in_full_precision_whatever_the_target_computes_in(
    subject, name
):
    found = subject(name)
    found.target.model.set_dtype(mx.bfloat16)
    config = FILES.read_drafter(found.folder).config
    network = FILES.load(found.folder, config, found.target, PairConfig()).module
    gate = next(m for n, m in network.named_modules() if n.endswith("gate"))
    kept = next(a for n, a in found.tensors.items() if "correction_bias" in n)
    assert np.array_equal(np.array(gate.e_score_correction_bias), kept)
    assert network.fc.weight.dtype == mx.bfloat16


# Other layouts


def packed(tensors: dict[str, Array], bits: int) -> dict[str, Array]:
    """With the matrices that can be packed, but those that choose experts, as MLX packs them."""
    found = dict(tensors)
    for name, array in tensors.items():
        if array.ndim > 1 and array.shape[-1] % 32 == 0 and not name.endswith("mlp.gate.weight"):
            parts = map(np.array, mx.quantize(mx.array(array), 32, bits))
            place = name.removesuffix("weight")
            found |= zip(
                [f"{place}{n}" for n in ("weight", "scales", "biases")], parts, strict=True
            )
    return found


def test_deepseek_s_eight_bit_floats_are_unpacked_block_by_block(tmp_path):
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    raw = {**DEEPSEEK, "moe_intermediate_size": 160, "quantization_config": packed}
    stored, meant = in_eight_bits(DeepSeek(raw))
    assert max(a.shape[0] for n, a in stored.items() if n.endswith("scale_inv")) > 1, "blocks"
    write_eight_bits(tmp_path, raw, stored)
    target = Target(make_model("llama"), 512, "llama")
    found = PublishedHeads(tmp_path / "other", raw, meant, target)
    config = FILES.read_drafter(tmp_path).config
    assert error(found, FILES.load(tmp_path, config, target, PairConfig())) < TOLERANCE


@pytest.mark.parametrize("bits", [None, 8])
def test_mlx_vlm_s_split_folder_is_read_packed_or_not(tmp_path, bits):
    head = DeepSeek(GLM_LITE)
    raw, tensors = as_split(head)
    if bits is not None:
        tensors = packed(tensors, bits)
        raw["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    write_drafter_folder(tmp_path, raw, tensors)
    assert format_as_drafter(read_json(tmp_path)) is FILES
    target = Target(make_model("llama"), 512, "llama")
    found = PublishedHeads(tmp_path / "other", head.raw, head.tensors, target)
    config = FILES.read_drafter(tmp_path).config
    model = FILES.load(tmp_path, config, target, PairConfig())
    assert error(found, model) < (TOLERANCE if bits is None else 0.3)
    assert (config.quantization and config.quantization.bits) == bits


def test_a_head_in_several_shards_is_read(tmp_path):
    write_shards(tmp_path, *FORMATS["glm"])
    FILES.read_drafter(tmp_path)


# Refusals, before weights are read


REFUSED = {
    "two heads": ("glm", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
    "no head": ("glm", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
    "a recurrent block": (
        "nemotron",
        {"mtp_hybrid_override_pattern": "M*"},
        "mtp_hybrid_override_pattern is 'M\\*'",
    ),
    "a sliding layer": (
        "exaone",
        {"mtp_layer_types": ["sliding_attention"]},
        "mtp_layer_types is .*sliding.* only full attention is",
    ),
    "a field that nobody knows": ("glm", {"mtp_reads": "a"}, "mtp_reads is 'a', a field that"),
    "the halves turned round": (
        "deepseek",
        {"mtp_hidden_states_first": True},
        "mtp_hidden_states_first is True",
    ),
    "no number of experts": ("glm", {"n_routed_experts": None}, "mlx-lm cannot arrange"),
    "another number of experts": ("deepseek", {"n_routed_experts": 5}, "experts.4.* is missing"),
    "another width": (
        "mimo",
        {"hidden_size": 32, "head_dim": 8},
        r"fc.weight .* is \(64, 128\), but .* asks for \(32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_its_configuration_does_not_describe_is_refused(tmp_path, case):
    name, changes, message = REFUSED[case]
    raw, tensors = FORMATS[name]
    write_drafter_folder(tmp_path, {**raw, **changes}, tensors)
    with pytest.raises(DFlashError, match=message):
        FILES.read_drafter(tmp_path)


@pytest.mark.parametrize("kind", Unread.reasons)
def test_a_head_that_is_known_and_not_read_is_refused_with_the_reason(tmp_path, kind):
    raw, tensors = FORMATS["deepseek"]
    write_drafter_folder(tmp_path, {**raw, "model_type": kind}, tensors)
    assert format_as_drafter(read_json(tmp_path)) is FILES
    with pytest.raises(DFlashError, match=f"{kind}.*{Unread.reasons[kind]}"):
        FILES.read_drafter(tmp_path)
    assert FILES.lacking(FORMATS["deepseek"][0]), "where to get one"
    assert not FILES.lacking({**raw, "model_type": kind})


def test_a_tensor_that_is_missing_is_named(tmp_path):
    raw, tensors = FORMATS["deepseek"]
    gone = next(n for n in tensors if n.endswith("kv_b_proj.weight"))
    write_drafter_folder(tmp_path, raw, {n: a for n, a in tensors.items() if n != gone})
    with pytest.raises(DFlashError, match=r"layers\.0\.self_attn\.embed_q\.weight .* is missing"):
        FILES.read_drafter(tmp_path)


# At the sizes that are published, without weights


def headers(head: Head) -> dict[str, TensorHeader]:
    """What the files of a checkpoint say of its head; DeepSeek's matrices have eight bits."""
    found = {name: TensorHeader("BF16", shape) for name, shape in head.shapes().items()}
    if "quantization_config" in head.raw:
        for name, (_, shape) in list(found.items()):
            if len(shape) == 2 and ("self_attn" in name or "expert" in name):
                blocks = tuple(-(-size // 128) for size in shape)
                found[name] = TensorHeader("F8_E4M3", shape)
                found[f"{name}_scale_inv"] = TensorHeader("F32", blocks)
    return found


@pytest.mark.parametrize("name", published_sizes.HEADS)
def test_a_head_of_a_published_size_fits_what_its_configuration_asks_for(name):
    head = published_sizes.HEADS[name]
    assert FILES.reads_target(head.raw)
    tensors = headers(head)
    config = FILES.parse_config(head.raw, name, tensors)
    assert not [*FILES.check_tensors(tensors, config, name)]
    assert config.notes == ()
