"""Drafter folders in every published format: read, renamed, and drafting what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import dflash_mlx
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BestFirst, BlockDiffusion
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, NetworkConfig
from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.models.check import check_drafter
from support import reference_dflash2
from support.converted import assert_same_tensors
from support.decoding import behind, open_with
from support.drafter_formats import (
    DRAFT_IDS,
    HALVES,
    SCALES,
    Drafting,
    features_of,
    speculators,
    version_1,
    write_shards,
)
from support.families import VOCAB_SIZE
from support.reference_dflash import random_drafter, write_drafter_folder

DATA = Path(__file__).parents[1] / "data"
SHIPPED = Path(dflash_mlx.__file__).parent / "data" / "smollm2-135m-dflash"
MEGABYTES_ALLOWED = 90  # all drafters together
TOLERANCE = 1e-4


# What is read


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
    subject = Drafting(tmp_path, raw, tensors)
    kept = [isinstance(layer, ConvolvedLayer) for layer in subject.model.module.layers]
    assert kept == [False, part != "nothing"]
    assert subject.error(features_of(20), 7, 6) < TOLERANCE


def test_the_published_second_version_has_the_tensors_that_its_config_asks_for():
    raw = json.loads((DATA / "dflash2-config.json").read_text())
    published = json.loads((DATA / "dflash2-header.json").read_text())
    shapes = {name: tuple(h["shape"]) for name, h in published.items()}
    network = FILES.build(FILES.parse_config(raw, "published"), "published")
    assert {name: array.shape for name, array in parameters_of(network).items()} == shapes
    assert {h["dtype"] for h in published.values()} == {"BF16"} and raw["dtype"] == "bfloat16"
    assert reference_dflash2.shapes(raw) == shapes


# Fields


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def parse(raw: dict[str, Any]) -> NetworkConfig:
    return FILES.parse_config(raw, "test")  # type: ignore[no-any-return]


@pytest.mark.parametrize("write", [write_drafter_folder, write_shards])
@pytest.mark.parametrize(
    ("attention_bias", "dtype"), [(False, mx.float32), (True, mx.float32), (False, mx.bfloat16)]
)
def test_weights_come_back_in_the_type_of_the_target(tmp_path, write, attention_bias, dtype):
    raw = version_1(attention_bias=attention_bias)
    written = random_drafter(raw)
    if attention_bias:
        for layer in range(raw["num_hidden_layers"]):
            for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items():
                bias = np.arange(rows, dtype=np.float32)
                written[f"layers.{layer}.self_attn.{name}_proj.bias"] = bias
    folder = write(tmp_path, raw, written)
    read = parameters_of(FILES.load_network(folder, FILES.read_config(folder), dtype))
    expected = {name: mx.array(tensor).astype(dtype) for name, tensor in written.items()}
    assert_same_tensors(read, expected)


def lacking(*names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in version_1(**changes).items() if k not in names}


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (None, {"rope_type": "default", "rope_theta": 5e5}),
        (YARN, {**YARN, "rope_theta": 5e5}),
        (
            {"type": "linear", "factor": 2.0},
            {"rope_type": "linear", "type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rope_is_read_in_both_layouts(scaling, rope):
    expected = parse(version_1(rope_theta=5e5, rope_scaling=scaling))
    assert expected.rope == {"rope_theta": 5e5, **rope}
    given = {**(scaling or {}), **rope, "rope_theta": 5e5}
    newer = lacking("rope_theta", "rope_scaling", rope_parameters=given)
    assert parse(newer) == expected


INSIDE = {"block_size": 6}
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
LIBRARY = speculators(transformer_layer_config={"rope_parameters": ROPES, **SLIDING})


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (version_1(), {"block_size": 8, "final_logit_softcapping": None, "notes": ()}),
        (version_1(dflash_config=INSIDE), {"block_size": 6}),
        (lacking("block_size", dflash_config=INSIDE), {"block_size": 6}),
        (lacking("head_dim", "num_key_value_heads"), {"head_dim": 16, "num_key_value_heads": 4}),
        (lacking("attention_bias"), {"attention_bias": False}),
        (version_1(), {"input_embedding_scale": 1.0, "output_multiplier": 1.0}),
        (version_1(dflash_config=SCALES), SCALES),
        (version_1(final_logit_softcapping=9.0), {"final_logit_softcapping": 9.0}),
        (LIBRARY, {"rope": {"rope_theta": 2e4, "rope_type": "default"}}),
    ],
)
def test_fields_are_read_in_each_of_their_places_and_follow_from_others(raw, fields):
    read = parse(raw)
    assert {name: getattr(read, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("raw", "windows", "causal"),
    [
        (version_1(), (None, None), (False, False)),
        (version_1(is_causal=True), (None, None), (True, True)),
        (version_1(dflash_config={"causal": True}), (None, None), (True, True)),
        (version_1(dflash_config={"causal": True}, is_causal=False), (None,) * 2, (False, False)),
        (version_1(**SLIDING), (6, None), (True, False)),
        (version_1(**SLIDING, is_causal=True), (6, None), (True, True)),
        (version_1(**SLIDING, is_causal=False), (6, None), (False, False)),
        (version_1(layer_types=None, sliding_window=6), (None, None), (False, False)),
        (LIBRARY, (6, None), (True, False)),
        ({**LIBRARY, "sliding_window_non_causal": True}, (6, None), (False, False)),
        ({**LIBRARY, "sliding_window_non_causal": None}, (6, None), (True, False)),
    ],
)
def test_windows_and_causality_follow_from_layer_types_and_flags(raw, windows, causal):
    read = parse(raw)
    assert (read.layer_windows, read.layer_causal) == (windows, causal)


# Decoding


def test_drafts_of_a_draft_vocabulary_hold_no_other_token(drafting):
    model = drafting(HALVES).model
    for drafter in (BlockDiffusion(model), BestFirst(model, None, 12)):
        state = behind(drafter, 0, features_of(12))
        for anchor in range(0, VOCAB_SIZE, 5):
            open_with(state, anchor)
            drafted = drafter.draft(state, 100).tree.drafted
            assert drafted and set(drafted) <= set(DRAFT_IDS.tolist())
    assert not set(range(40)) <= set(DRAFT_IDS.tolist()), "draft ids are not the target's"


# Published and shipped


def test_a_published_config_is_read():
    config = FILES.parse_config(
        json.loads((DATA / "dflash-qwen3-4b-config.json").read_text()), "it"
    )
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (2560, 8, 128)
    assert (config.block_size, config.mask_token_id) == (16, 151669)
    assert (config.aux_layers, config.num_target_layers) == ((1, 9, 17, 25, 33), 36)
    assert config.rope == {"rope_theta": 1000000, "rope_type": "default"}


@pytest.mark.parametrize("name", ["smollm2-135m-dflash", "smollm2-135m-variable-prefix"])
def test_the_shipped_drafters_are_complete_and_small(name):
    folder = SHIPPED.parent / name
    config = FILES.read_config(folder)
    target = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
    assert not [*FILES.misfits(config, target, "default")]
    weights = parameters_of(FILES.load_network(folder, config, mx.float32))
    assert all(bool(mx.isfinite(array).all()) for array in weights.values())
    assert not any(config.layer_causal), "blocks see both ways, as they were trained"
    size = sum(file.stat().st_size for file in SHIPPED.parent.rglob("*") if file.is_file())
    assert 1e6 < size < MEGABYTES_ALLOWED * 1e6
