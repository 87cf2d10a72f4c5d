"""What is read of drafter folders: fields in both of their places, weights in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import dflash_mlx
from dflash_mlx.drafters.dflash.checkpoint import (
    check_fit,
    load_network,
    parse_config,
    read_config,
)
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.dflash.tensors import parameters_of
from support.drafter_formats import SCALES, version_1, write_shards
from support.reference_dflash import random_drafter, write_drafter_folder

PUBLISHED = Path(__file__).parents[1] / "data"
SHIPPED = Path(dflash_mlx.__file__).parent / "data" / "smollm2-135m-dflash"
MEGABYTES_ALLOWED = 60  # both drafters together
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def parameters(folder: Path, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    return parameters_of(load_network(folder, read_config(folder), dtype))


def parse(raw: dict[str, Any]) -> NetworkConfig:
    return parse_config(raw, "test")


@pytest.mark.parametrize("write", [write_drafter_folder, write_shards])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_weights_come_back_as_they_were_written(tmp_path, write, attention_bias):
    raw = version_1(attention_bias=attention_bias)
    written = random_drafter(raw)
    if attention_bias:
        for layer in range(raw["num_hidden_layers"]):
            for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items():
                bias = np.arange(rows, dtype=np.float32)
                written[f"layers.{layer}.self_attn.{name}_proj.bias"] = bias
    read = parameters(write(tmp_path, raw, written))
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert np.array_equal(np.array(read[name]), tensor), name


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_weights_are_cast_to_the_type_of_the_target(tmp_path, dtype):
    read = parameters(
        write_drafter_folder(tmp_path, version_1(), random_drafter(version_1())), dtype
    )
    assert {array.dtype for array in read.values()} == {dtype}


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
    newer = {k: v for k, v in version_1().items() if k not in ("rope_theta", "rope_scaling")}
    assert (
        parse({**newer, "rope_parameters": {**(scaling or {}), **rope, "rope_theta": 5e5}})
        == expected
    )


def test_the_block_size_is_read_in_both_places():
    inside = version_1(dflash_config={"block_size": 6})
    assert parse(version_1()).block_size == 8
    assert parse(inside).block_size == 6
    del inside["block_size"]
    assert parse(inside).block_size == 6


def test_absent_optional_fields_follow_from_the_others():
    left_out = ("head_dim", "num_key_value_heads", "attention_bias")
    read = parse({k: v for k, v in version_1().items() if k not in left_out})
    assert (read.head_dim, read.num_key_value_heads, read.attention_bias) == (16, 4, False)
    assert (read.input_embedding_scale, read.output_multiplier) == (1.0, 1.0)
    assert read.final_logit_softcapping is None


def test_scales_and_soft_caps_are_read():
    read = parse(version_1(dflash_config=SCALES))
    assert {name: getattr(read, name) for name in SCALES} == SCALES
    assert parse(version_1(final_logit_softcapping=9.0)).final_logit_softcapping == 9.0


@pytest.mark.parametrize(
    ("fields", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"is_causal": False}, (None, None), (False, False)),
        ({"dflash_config": {"causal": True}}, (None, None), (True, True)),
        ({"dflash_config": {"causal": True}, "is_causal": False}, (None, None), (False, False)),
        (SLIDING, (6, None), (True, False)),
        ({**SLIDING, "is_causal": True}, (6, None), (True, True)),
        ({**SLIDING, "is_causal": False}, (6, None), (False, False)),
        ({"layer_types": None, "sliding_window": 6}, (None, None), (False, False)),
    ],
)
def test_windows_and_causality_follow_from_layer_types_and_is_causal(fields, windows, causal):
    read = parse(version_1(**fields))
    assert (read.layer_windows, read.layer_causal) == (windows, causal)


def test_a_published_config_is_read():
    raw = json.loads((PUBLISHED / "dflash-qwen3-4b-config.json").read_text())
    assert parse(raw) == NetworkConfig(
        hidden_size=2560,
        intermediate_size=9728,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope={"rope_theta": 1000000, "rope_type": "default"},
        max_position_embeddings=40960,
        layer_windows=(None,) * 5,
        layer_causal=(False,) * 5,
        attention_bias=False,
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        vocab_size=151936,
    )


def test_the_shipped_drafter_is_complete_and_small():
    config = read_config(SHIPPED)
    check_fit(config, {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}, "default")
    assert all(bool(mx.isfinite(array).all()) for array in parameters(SHIPPED).values())
    size = sum(file.stat().st_size for file in SHIPPED.parent.rglob("*") if file.is_file())
    assert 1e6 < size < MEGABYTES_ALLOWED * 1e6
