"""Drafter folders: what is read, and what is refused before a weight is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

import dflash_mlx
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import check_fit, load_network, read_config
from dflash_mlx.drafters.dflash.network import NetworkConfig
from support.checkpoints import dflash, without, write, write_config
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder

PUBLISHED = Path(__file__).parents[1] / "data"
SHIPPED = Path(dflash_mlx.__file__).parent / "data" / "smollm2-135m-dflash"
MEGABYTES_ALLOWED = 60  # both drafters together
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def parameters(folder: Path, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    return dict(tree_flatten(load_network(folder, read_config(folder), dtype).parameters()))


# What is read


def test_weights_come_back_as_they_were_written(tmp_path):
    config = tiny_drafter_config()
    read = parameters(write(tmp_path, config))
    written = random_drafter(config)
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert np.array_equal(np.array(read[name]), tensor), name


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_weights_are_cast_to_the_type_of_the_target(tmp_path, dtype):
    read = parameters(write(tmp_path), dtype)
    assert {array.dtype for array in read.values()} == {dtype}


def test_weights_may_be_spread_over_several_files(tmp_path):
    whole, sharded = write(tmp_path / "whole"), write(tmp_path / "sharded")
    tensors = random_drafter(tiny_drafter_config())
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate([names[:5], names[5:6], names[6:]], start=1):
        shard = {name: tensors[name] for name in part}
        save_file(shard, sharded / f"model-0000{i}-of-00003.safetensors")
    expected, read = parameters(whole), parameters(sharded)
    assert read.keys() == expected.keys()
    assert all(np.array_equal(np.array(read[k]), np.array(expected[k])) for k in expected)


def test_biases_are_read_where_the_config_asks_for_them(tmp_path):
    config = tiny_drafter_config(attention_bias=True)
    tensors = random_drafter(config)
    for layer in range(config["num_hidden_layers"]):
        for name, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items():
            tensors[f"layers.{layer}.self_attn.{name}_proj.bias"] = np.ones(rows, np.float32)
    read = parameters(write_drafter_folder(tmp_path, config, tensors))
    assert read.keys() == tensors.keys()


def test_rope_is_read_in_both_layouts(tmp_path):
    older = write_config(tmp_path, tiny_drafter_config(rope_theta=5e5, rope_scaling=None))
    expected = read_config(older)
    assert (expected.rope["rope_theta"], expected.rope["rope_type"]) == (5e5, "default")
    newer = without("rope_theta", "rope_scaling")
    newer["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert read_config(write_config(tmp_path, newer)) == expected


def test_scaled_rope_is_read_in_both_layouts(tmp_path):
    older = write_config(tmp_path, tiny_drafter_config(rope_theta=5e5, rope_scaling=YARN))
    expected = read_config(older)
    assert expected.rope == {**YARN, "rope_theta": 5e5}
    newer = without("rope_theta", "rope_scaling")
    newer["rope_parameters"] = {**YARN, "rope_theta": 5e5}
    assert read_config(write_config(tmp_path, newer)) == expected


def test_the_oldest_name_of_a_rope_type_is_understood(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    config = read_config(write_config(tmp_path, tiny_drafter_config(rope_scaling=scaling)))
    assert config.rope["rope_type"] == "linear"


def test_the_block_size_is_read_in_both_places(tmp_path):
    inside = {**dflash(block_size=6)}
    del inside["block_size"]
    assert read_config(write_config(tmp_path, tiny_drafter_config())).block_size == 8
    assert read_config(write_config(tmp_path, inside)).block_size == 6


def test_absent_optional_fields_follow_from_the_others(tmp_path):
    config = without("head_dim", "num_key_value_heads", "attention_bias")
    read = read_config(write_config(tmp_path, config))
    assert (read.head_dim, read.num_key_value_heads, read.attention_bias) == (16, 4, False)
    assert (read.input_embedding_scale, read.output_multiplier) == (1.0, 1.0)
    assert read.final_logit_softcapping is None


def test_scales_and_soft_caps_are_read(tmp_path):
    scales = {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
    }
    read = read_config(write_config(tmp_path, dflash(**scales)))
    assert {name: getattr(read, name) for name in scales} == scales


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize(
    ("fields", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"is_causal": False}, (None, None), (False, False)),
        (dflash(causal=True), (None, None), (True, True)),
        ({**dflash(causal=True), "is_causal": False}, (None, None), (False, False)),
        (SLIDING, (6, None), (True, False)),
        ({**SLIDING, "is_causal": True}, (6, None), (True, True)),
        ({**SLIDING, "is_causal": False}, (6, None), (False, False)),
        ({"layer_types": None, "sliding_window": 6}, (None, None), (False, False)),
    ],
)
def test_windows_and_causality_follow_from_layer_types_and_is_causal(
    tmp_path, fields, windows, causal
):
    read = read_config(write_config(tmp_path, tiny_drafter_config(**fields)))
    assert (read.layer_windows, read.layer_causal) == (windows, causal)


def published(tmp_path: Path, name: str) -> Path:
    (tmp_path / "config.json").write_text((PUBLISHED / name).read_text())
    return tmp_path


def test_a_published_config_is_read(tmp_path):
    assert read_config(published(tmp_path, "dflash-qwen3-4b-config.json")) == NetworkConfig(
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
    read = parameters(SHIPPED)
    assert all(bool(mx.all(mx.isfinite(array)).item()) for array in read.values())
    size = sum(file.stat().st_size for file in SHIPPED.parent.rglob("*") if file.is_file())
    assert 1e6 < size < MEGABYTES_ALLOWED * 1e6


# Whether a drafter fits a target

TARGET = {"hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 4}


def test_a_drafter_fits_the_target_it_was_made_for(tmp_path):
    config = read_config(write(tmp_path))
    check_fit(config, TARGET, "tiny")
    with pytest.raises(DFlashError):
        check_fit(replace(config, vocab_size=98), TARGET, "tiny")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 128, "with hidden_size 64, but tiny has 128"),
        ("vocab_size", 98, "with vocab_size 97, but tiny has 98"),
        ("num_hidden_layers", 5, "with number of target layers 4, but tiny has 5"),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(tmp_path, field, value, message):
    config = read_config(write(tmp_path))
    with pytest.raises(DFlashError, match=message) as failure:
        check_fit(config, {**TARGET, field: value}, "tiny")
    assert "--drafter" in failure.value.next_step and "--method none" in failure.value.next_step
