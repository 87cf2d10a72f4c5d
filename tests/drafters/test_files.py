"""Which files of draft models are read, in every format of every family, and what they say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model

import dflash_mlx
from dflash_mlx import DFlashError, PairConfig
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, Network
from dflash_mlx.drafters.eagle3.model import usual_layers
from dflash_mlx.drafters.methods import format_as_drafter, format_of
from dflash_mlx.drafters.networks.files import (
    KEPT,
    Quantization,
    parameters_of,
    quantization_of,
    quantize_network,
    save_network,
)
from dflash_mlx.models.check import check_drafter
from dflash_mlx.models.load import load_pair
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.verifier.model import Target
from support import reference_dflash2, reference_eagle3
from support.converted import assert_same_tensors, config, convert
from support.drafter_formats import (
    FORMATS,
    FULL,
    HALVES,
    SCALES,
    speculators,
    version_1,
    write_shards,
)
from support.drafting import CASES, TOLERANCE, Blocks
from support.families import VOCAB_SIZE, make_model
from support.masked_formats import a2d_qwen2, a2d_qwen3, dream, fast_dllm, ours, sdar
from support.models import write_model
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_eagle3 import LAYERS_READ as IDS
from support.reference_eagle3 import inner
from support.reference_eagle3 import raw as eagle
from support.reference_eagle3 import speculators as speculators_3

DATA = Path(__file__).parents[1] / "data"
SHIPPED = Path(dflash_mlx.__file__).parent / "data" / "smollm2-135m-dflash"
MEGABYTES_ALLOWED = 90  # all drafters together
QWEN = 151_936


def lacking(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in names}


def files_of(name: str) -> Any:
    return format_as_drafter(*CASES[name][1])


def parsed(raw: dict[str, Any], stored: Any = ()) -> Any:
    files = format_of(raw)
    assert files is not None
    return files.parse_config(raw, "it", stored)


# Fields

INSIDE = {"block_size": 6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"type": "linear", "factor": 2.0}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
LIBRARY = speculators(transformer_layer_config={"rope_parameters": ROPES, **SLIDING})
OWN_LAYERS = speculators(dflash_config={"target_layer_ids": [1, 2]})
UNTOLD = lacking(eagle(), "eagle_config")


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope": {"rope_theta": 5e5, "rope_type": "default", **changes}}


def roped(scaling: Any) -> dict[str, Any]:
    """In the older layout."""
    return version_1(rope_theta=5e5, rope_scaling=scaling)


def roped_anew(**parameters: Any) -> dict[str, Any]:
    given = {"rope_theta": 5e5, **parameters}
    return lacking(version_1(rope_parameters=given), "rope_theta", "rope_scaling")


def windows(raw: dict[str, Any], first: int | None, *causal: bool) -> tuple[dict[str, Any], Any]:
    return raw, {"layer_windows": (first, None), "layer_causal": causal}


def proposing(methods: Any, rows: int, first: bool) -> tuple[dict[str, Any], Any]:
    """DSpark of an older file, which only says how many tokens it proposes."""
    says = {"sample_from_anchor": None, "speculators_config": {"proposal_methods": methods}}
    return speculators("dspark", **says), {"block_size": rows, "sample_from_anchor": first}


def left_out(
    raw: dict[str, Any], mask: int, block: int, shifted: bool
) -> tuple[dict[str, Any], Any]:
    """What is known of the class of a masked diffusion model."""
    known = {"mask_token_id": mask, "block_size": block, "logits_shifted": shifted}
    return lacking(raw, "mask_token_id"), {**known, "notes": str(mask)}


# What is read of a config.json; of its notes, what they match, "" for none
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (version_1(), {"block_size": 8, "final_logit_softcapping": None, "notes": ""}),
    (version_1(), {"input_embedding_scale": 1.0, "output_multiplier": 1.0}),
    (version_1(dflash_config=INSIDE), INSIDE),
    (lacking(version_1(dflash_config=INSIDE), "block_size"), INSIDE),
    (lacking(version_1(), "head_dim", "num_key_value_heads"),
     {"head_dim": 16, "num_key_value_heads": 4}),
    (lacking(version_1(), "attention_bias"), {"attention_bias": False}),
    (version_1(dflash_config=SCALES), SCALES),
    (version_1(final_logit_softcapping=9.0), {"final_logit_softcapping": 9.0}),
    # layers, numbered as the field that names them does
    (speculators(),
     {"aux_layers": (0, 2), "notes": r"aux_hidden_state_layer_ids \[1, 3\] .* layers \[0, 2\]"}),
    (OWN_LAYERS, {"aux_layers": (1, 2), "notes": ""}),
    (eagle(), {"notes": ""}),
    (inner(**{IDS: [1, 17, 32]}), {"aux_layers": (1, 17, 32)}),
    (speculators_3(**{IDS: [2, 18, 33]}), {"aux_layers": (1, 17, 32)}),
    (speculators_3(), {"notes": r"layers \[0, 1, 2\]"}),
    (UNTOLD, {"aux_layers": None}),
    # ropes, in both layouts
    (roped(None), rope()),
    (roped(YARN), rope(**YARN)),
    (roped(LINEAR), rope(rope_type="linear", **LINEAR)),
    (roped_anew(rope_type="default"), rope()),
    (roped_anew(**YARN), rope(**YARN)),
    (roped_anew(**LINEAR), rope(rope_type="linear", **LINEAR)),
    (LIBRARY, rope(rope_theta=2e4)),
    # windows, and whether a row sees those behind it
    windows(version_1(), None, False, False),
    windows(version_1(is_causal=True), None, True, True),
    windows(version_1(dflash_config={"causal": True}), None, True, True),
    windows(version_1(dflash_config={"causal": True}, is_causal=False), None, False, False),
    windows(version_1(**SLIDING), 6, True, False),
    windows(version_1(**SLIDING, is_causal=True), 6, True, True),
    windows(version_1(**SLIDING, is_causal=False), 6, False, False),
    windows(version_1(layer_types=None, sliding_window=6), None, False, False),
    windows(LIBRARY, 6, True, False),
    windows({**LIBRARY, "sliding_window_non_causal": True}, 6, False, False),
    windows({**LIBRARY, "sliding_window_non_causal": None}, 6, True, False),
    # whether the anchor's row drafts
    (speculators("dspark"), {"block_size": 7, "sample_from_anchor": True}),
    (speculators("dspark", sample_from_anchor=False), {**INSIDE, "sample_from_anchor": False}),
    proposing(None, 6, False),
    proposing([5], 6, False),
    proposing([{"speculative_tokens": 6}], 7, True),
    proposing([{"speculative_tokens": 5}], 6, False),
    # masked diffusion, and what its files leave out
    (ours(), {"notes": ""}),
    (a2d_qwen3(), {"notes": "trained to see later tokens.* blocks have 8"}),
    (a2d_qwen3(mask_token_id=7, block_size=5), {"mask_token_id": 7, "block_size": 5}),
    left_out(a2d_qwen3(vocab_size=QWEN), 151669, 8, False),
    left_out(a2d_qwen2(vocab_size=QWEN), 151665, 8, False),
    left_out(sdar(vocab_size=QWEN), 151669, 4, False),
    left_out(fast_dllm(vocab_size=QWEN, bd_size=32), 151665, 32, True),
    left_out(lacking(fast_dllm(vocab_size=QWEN), "bd_size"), 151665, 32, True),
    left_out(dream(vocab_size=152_064), 151666, 8, True),
    (json.loads((DATA / "dflash-qwen3-4b-config.json").read_text()),
     {"hidden_size": 2560, "num_key_value_heads": 8, "head_dim": 128, "num_target_layers": 36,
      "block_size": 16, "mask_token_id": 151669, "aux_layers": (1, 9, 17, 25, 33),
      "rope": {"rope_theta": 1000000, "rope_type": "default"}}),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "fields"), READ)
def test_fields_are_read_in_each_of_their_places_and_follow_from_others(raw, fields):
    found, expected = parsed(raw, FULL), dict(fields)
    if (note := expected.pop("notes", None)) is not None:
        notes = " ".join(found.notes)
        assert re.search(note, notes) if note else not notes
    assert {name: getattr(found, name) for name in expected} == expected


def test_without_layers_these_are_the_usual_ones_and_read_when_loaded(tmp_path):
    assert usual_layers(36) == (1, 17, 32), "the states before layers 2, 18 and 33"
    model = write_model(tmp_path / "model", make_model("llama", layers=7), num_hidden_layers=7)
    folder = write_drafter_folder(tmp_path, UNTOLD, reference_eagle3.random_tensors(UNTOLD))
    pair = load_pair(PairConfig(str(model), str(folder)))
    assert pair.drafters[0].aux_layers == (1, 2, 3)


def test_a_model_that_is_no_drafter_stays_a_target():
    assert format_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) is None


# Whether a drafter fits a target

T = {"hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("raw", "target", "said"),
    [
        (version_1(), {"hidden_size": 128}, "hidden_size 64, but T has 128"),
        (version_1(), {"vocab_size": 98}, "vocab_size 97, but T has 98"),
        (version_1(), {"num_hidden_layers": 5}, "number of target layers 3, but T has 5"),
        (speculators(), {"num_hidden_layers": 2}, r"layers \[0, 2\] .* T has 2 .* no layer 2"),
        (version_1(), {}, ""),
        (eagle(), {"hidden_size": 32}, "hidden_size 64, but T has 32"),
        (eagle(), {"num_hidden_layers": 2}, r"layers \[0, 1, 2\] .* T has 2 .* no layer 2"),
        (UNTOLD, {}, r"layers \[1, 0, -1\] .* has 3 layers, and no layer -1"),
        (UNTOLD, {"num_hidden_layers": 4}, r"layers \[1, 1, 0\] .* T has 4 layers"),
        (UNTOLD, {"num_hidden_layers": 6}, r"layers \[1, 2, 2\] .* T has 6 layers"),
        (inner(**{IDS: [2, 1, 0]}), {}, r"layers \[2, 1, 0\] .* T has 3 layers"),
        (UNTOLD, {"num_hidden_layers": 7}, ""),
        (eagle(), {}, ""),
        (ours(), {"hidden_size": 32}, "hidden_size 64, but T has 32"),
        (ours(), {"vocab_size": None}, "vocab_size 97, but T has None"),
        (a2d_qwen3(), {"vocab_size": 98}, "vocab_size 97, but T has 98"),
        (a2d_qwen3(), {}, ""),
    ],
)  # fmt: skip
def test_another_target_is_refused_with_both_values(raw, target, said):
    files = format_of(raw)
    found = [*files.misfits(parsed(raw), {**T, **target}, "T", "D")]
    assert bool(found) == bool(said)
    if said:
        assert re.search(f"drafter D .*{said}", found[0].what)
        assert "--drafter" in found[0].next_step and "--method none" in found[0].next_step


# Folders


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_recognised_and_converted_to_the_same_drafter(tmp_path, name):
    source, files = write_drafter_folder(tmp_path / "source", *CASES[name][1]), files_of(name)
    family = name.partition(", ")[0].partition(" of ")[0]
    assert files.family == (family if family in ("eagle3", "mtp", "specdiff") else "dflash")
    assert not check_drafter(source).errors
    converted = convert(source, tmp_path / "ours", *["--mtp"] * (family == "mtp"))
    before, after = files.read_drafter(source), files.read_drafter(converted)
    assert replace(before.config, notes=()) == replace(after.config, notes=())
    assert set(before.config.notes) == set(after.config.notes)
    assert "auto_map" not in config(converted)
    assert_same_tensors(before.tensors, after.tensors)


@pytest.mark.parametrize("name", ["version 2", "speculators, version 2"])
def test_the_codebooks_of_the_selector_may_be_named_as_embeddings(drafting, tmp_path, name):
    subject = drafting(name)
    renamed = {
        f"{n}.weight" if n.endswith("codebook") else n: t for n, t in subject.tensors.items()
    }
    assert len(renamed.keys() - subject.tensors.keys()) == 2
    write_drafter_folder(tmp_path, subject.raw, renamed)
    assert not check_drafter(tmp_path).errors
    read, expected = FILES.read_drafter(tmp_path), FILES.read_drafter(subject.folder)
    assert_same_tensors(read.tensors, expected.tensors)
    write_drafter_folder(tmp_path, subject.raw, renamed | subject.tensors)
    with pytest.raises(DFlashError, match=r"codebook.weight in .* no such tensor"):
        FILES.read_drafter(tmp_path)


def changed_part(tensors: dict[str, np.ndarray], part: str, conv: str, side: int) -> None:
    """Let an idle convolution of the second layer do something."""
    if part == "the projection":
        projection = tensors[f"layers.1.{conv}.kernel_projection.weight"]
        projection[side * len(projection) // 2 + 3, 5] = 0.5
    else:
        base = tensors[f"layers.1.{conv}.base_kernel"]
        base[side, int(part == "the row before"), 7] = 0.25


@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("conv", ["attention_conv", "mlp_conv"])
@pytest.mark.parametrize("part", ["nothing", "the row itself", "the row before", "the projection"])
def test_only_convolutions_that_change_nothing_are_left_out(tmp_path, part, conv, side):
    aux_layers = 1 if part == "nothing" and side else 2
    raw = reference_dflash2.tiny_config(dflash_config={"conv_kernel_size": aux_layers})
    tensors = reference_dflash2.idle_tensors(raw)
    if part != "nothing":
        changed_part(tensors, part, conv, side)
    subject = Blocks(tmp_path, raw, tensors)
    text = subject.text(20)
    kept = [isinstance(layer, ConvolvedLayer) for layer in subject.model.module.layers]
    assert kept == [False, part != "nothing"]
    assert subject.error(subject.context(text), text, 7, 6) < TOLERANCE


def test_the_published_second_version_has_the_tensors_that_its_config_asks_for():
    raw = json.loads((DATA / "dflash2-config.json").read_text())
    published = json.loads((DATA / "dflash2-header.json").read_text())
    shapes = {name: tuple(h["shape"]) for name, h in published.items()}
    network = FILES.build(FILES.parse_config(raw, "published"), "published")
    assert {name: array.shape for name, array in parameters_of(network).items()} == shapes
    assert {h["dtype"] for h in published.values()} == {"BF16"} and raw["dtype"] == "bfloat16"
    assert reference_dflash2.shapes(raw) == shapes


@pytest.mark.parametrize("write", [write_drafter_folder, write_shards])
@pytest.mark.parametrize(
    ("attention_bias", "dtype"), [(False, mx.float32), (True, mx.float32), (False, mx.bfloat16)]
)
def test_weights_come_back_in_the_type_of_the_target(tmp_path, write, attention_bias, dtype):
    raw = version_1(attention_bias=attention_bias)
    written = random_drafter(raw)
    folder = write(tmp_path, raw, written)
    read = parameters_of(FILES.load_network(folder, FILES.read_drafter(folder).config, dtype))
    expected = {name: mx.array(tensor).astype(dtype) for name, tensor in written.items()}
    assert_same_tensors(read, expected)


@pytest.mark.parametrize("name", ["smollm2-135m-dflash", "smollm2-135m-variable-prefix"])
def test_the_shipped_drafters_are_complete_and_small(name):
    folder = SHIPPED.parent / name
    config = FILES.read_drafter(folder).config
    target = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
    assert not [*FILES.misfits(config, target, "default")]
    weights = parameters_of(FILES.load_network(folder, config, mx.float32))
    assert all(bool(mx.isfinite(array).all()) for array in weights.values())
    assert not any(config.layer_causal), "blocks see both ways, as they were trained"
    size = sum(file.stat().st_size for file in SHIPPED.parent.rglob("*") if file.is_file())
    assert 1e6 < size < MEGABYTES_ALLOWED * 1e6


# Packed matrices


PACKED = [
    "version 2", HALVES, "dspark, draft vocabulary", "eagle3, raw", "eagle3, ours, 3.1",
    "specdiff, ours", "specdiff, a2d-qwen2", "mtp, ours", "mtp, qwen3_5_moe, split",
]  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
def test_packed_in_8_bits_it_drafts_nearly_the_same(tmp_path, name):
    source, files = write_drafter_folder(tmp_path / "source", *CASES[name][1]), files_of(name)
    packed = convert(source, tmp_path / "packed", "--bits", "8", "--group-size", "32")
    assert config(packed)["quantization"] == {"group_size": 32, "bits": 8}
    target, said = Target(make_model("llama"), 512, "tiny"), []
    for folder in (source, packed):
        model = files.load(folder, files.read_drafter(folder).config, target, PairConfig())
        assert bool(quantization_of(model.module)) == (folder == packed and not on_cpu())
        rng, context = np.random.default_rng(0), model.new_context()
        features = rng.normal(size=(9, 64 * len(model.aux_layers))).astype(np.float32)
        context.append(mx.array(rng.integers(VOCAB_SIZE, size=9)), mx.array(features))
        said.append(np.array(model.try_out(context)))
    assert 0 < np.abs(said[0] - said[1]).mean() < 0.1 * said[0].std()
    asked = PairConfig(drafter_bits=8)
    again = files.load(source, files.read_drafter(source).config, target, asked)
    assert quantization_of(again.module) is not None


@pytest.mark.parametrize("name", ["version 1", "version 2", "dspark", HALVES])
@pytest.mark.parametrize("bits", [4, 8])
def test_only_matrices_are_packed_and_the_folder_is_read_as_it_was_written(tmp_path, name, bits):
    drafter = FILES.read_drafter(write_drafter_folder(tmp_path / "plain", *FORMATS[name]))
    network, packed = drafter.network(), tmp_path / "packed"
    modules = network.named_modules()
    matrices = {path for path, part in modules if isinstance(part, nn.Linear | nn.Embedding)}
    matrices -= {path for path in matrices if any(kept in path for kept in KEPT)}
    network.set_dtype(mx.bfloat16)
    quantize_network(network, bits, 32)
    save_network(packed, network, drafter.raw)
    config = FILES.read_drafter(packed).config
    assert config.quantization == Quantization(32, bits)
    read = FILES.read_drafter(packed).network()
    assert quantization_of(read) == config.quantization
    assert_same_tensors(parameters_of(read), parameters_of(network))
    found = {path for path, module in read.named_modules() if hasattr(module, "scales")}
    assert found == matrices and {"fc", "layers.0.self_attn.q_proj"} <= found
    loaded = FILES.load_network(packed, config, mx.bfloat16, bits=4)  # not packed again
    expected = parameters_of(dequantize_model(network) if on_cpu() else network)
    assert_same_tensors(parameters_of(loaded), expected)


@pytest.mark.parametrize(
    ("bits", "group_size", "value"),
    [
        (3, 64, r"is 3; .*\(4, 8\)"),
        (16, 64, "is 16"),
        (4, 48, r"group_size .* is 48; .*\(32, 64, 128\)"),
        (4, 128, "down_proj has rows of 96 .* groups of 128"),
    ],
)
def test_what_cannot_be_packed_is_refused(bits, group_size, value):
    network = Network(FILES.parse_config(version_1(), "tiny"))
    with pytest.raises(DFlashError, match=value):
        quantize_network(network, bits, group_size)
    assert quantization_of(network) is None
