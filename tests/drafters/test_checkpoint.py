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
    parameters_of,
    parse_config,
    read_config,
)
from dflash_mlx.drafters.dflash.convolution import ConvolutionConfig
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from support.converted import assert_same_tensors
from support.drafter_formats import SCALES, speculators, version_1, write_shards
from support.reference_dflash import random_drafter, write_drafter_folder

PUBLISHED = Path(__file__).parents[1] / "data"
SHIPPED = Path(dflash_mlx.__file__).parent / "data" / "smollm2-135m-dflash"
MEGABYTES_ALLOWED = 60  # both drafters together
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def parse(raw: dict[str, Any]) -> NetworkConfig:
    return parse_config(raw, "test")


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
    read = parameters_of(load_network(folder, read_config(folder), dtype))
    expected = {name: mx.array(tensor).astype(dtype) for name, tensor in written.items()}
    assert_same_tensors(read, expected)


def without(*names: str, **changes: Any) -> dict[str, Any]:
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
    newer = without("rope_theta", "rope_scaling", rope_parameters=given)
    assert parse(newer) == expected


INSIDE = {"block_size": 6}
ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
LIBRARY = speculators(transformer_layer_config={"rope_parameters": ROPES, **SLIDING})


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (version_1(), {"block_size": 8, "final_logit_softcapping": None, "notes": ()}),
        (version_1(dflash_config=INSIDE), {"block_size": 6}),
        (without("block_size", dflash_config=INSIDE), {"block_size": 6}),
        (without("head_dim", "num_key_value_heads"), {"head_dim": 16, "num_key_value_heads": 4}),
        (without("attention_bias"), {"attention_bias": False}),
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


def test_the_published_second_version_is_read():
    config = parse(json.loads((PUBLISHED / "dflash2-config.json").read_text()))
    assert (config.block_size, config.mask_token_id) == (16, 201818)
    assert (config.final_logit_softcapping, config.output_multiplier) == (20.0, 26**-0.5)
    assert config.layer_windows == (2048,) * 5 and config.layer_causal == (False,) * 5
    assert config.convolution == ConvolutionConfig(2, 16)
    assert config.selector == SelectorConfig(256, 16)


def test_the_shipped_drafter_is_complete_and_small():
    config = read_config(SHIPPED)
    check_fit(config, {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}, "default")
    weights = parameters_of(load_network(SHIPPED, config, mx.float32))
    assert all(bool(mx.isfinite(array).all()) for array in weights.values())
    size = sum(file.stat().st_size for file in SHIPPED.parent.rglob("*") if file.is_file())
    assert 1e6 < size < MEGABYTES_ALLOWED * 1e6
