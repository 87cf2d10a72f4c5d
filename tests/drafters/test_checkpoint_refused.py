"""Drafter folders that cannot be read, each refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from dflash_mlx.models.check import check_drafter
from support.checkpoints import dflash, without, write, write_config
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder
from support.reference_dflash2 import tiny_config

NAN = float("nan")

REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_target_layers",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "block_size",
    "dflash_config",
    "dflash_config.mask_token_id",
    "dflash_config.target_layer_ids",
]


def tiny(**changes: Any) -> dict[str, Any]:
    return tiny_drafter_config(**changes)


REFUSED: dict[str, tuple[Any, str]] = {
    **{f"no {name}": (without(name), name.rpartition(".")[2]) for name in REQUIRED},
    "a list": ([], "holds a unknown"),
    "no architecture": (without("architectures"), "holds a unknown"),
    "an empty architecture": (tiny(architectures=[]), "holds a unknown"),
    "another architecture": (tiny(architectures=["Qwen3ForCausalLM"]), "holds a Qwen3ForCausalLM"),
    "the second version's name alone": (
        tiny(architectures=["DFlash2DraftModel"]),
        "lacks 'conv_kernel_size'",
    ),
    "an architecture that is a number": (tiny(architectures=7), "not a DFlashDraftModel"),
    "heads that do not divide": (
        tiny(num_key_value_heads=3),
        "4 attention heads do not divide by 3 key/value heads",
    ),
    "no heads": (tiny(num_attention_heads=0, num_key_value_heads=0), "heads"),
    "no heads and no head size": (
        {**without("head_dim", "num_key_value_heads"), "num_attention_heads": 0},
        "heads",
    ),
    "no layers": (tiny(num_hidden_layers=0), "layers"),
    "a width in words": (tiny(hidden_size="wide"), "hidden_size"),
    "a width that is a list": (tiny(hidden_size=[64]), "hidden_size"),
    "a block of one": (tiny(block_size=1), "block_size is 1"),
    "a block of one inside": (dflash(block_size=1), "block_size is 1"),
    "a negative block": (tiny(block_size=-8), "block_size is -8"),
    "a mask outside": (dflash(mask_token_id=97), "mask_token_id is 97, .* vocabulary of 97"),
    "a negative mask": (dflash(mask_token_id=-1), "mask_token_id is -1, .* vocabulary of 97"),
    "no taps": (dflash(target_layer_ids=[]), r"target_layer_ids are \[\]"),
    "a tap outside": (dflash(target_layer_ids=[0, 4]), r"\[0, 4\], outside the 4 layers"),
    "a negative tap": (dflash(target_layer_ids=[-1, 2]), r"\[-1, 2\], outside the 4 layers"),
    "taps that are a number": (dflash(target_layer_ids=3), "target_layer_ids"),
    "an empty dflash_config": (tiny(dflash_config=None), "dflash_config"),
    "an unknown kind of layer": (
        tiny(layer_types=["full_attention", "linear_attention"]),
        "linear_attention",
    ),
    "too few kinds of layers": (tiny(layer_types=["full_attention"]), "layer_types: 1 .* 2 layers"),
    "sliding layers without a window": (
        tiny(layer_types=["sliding_attention"] * 2),
        "sliding_window",
    ),
    "windows that no layer has": (dflash(use_swa=True), "use_swa is true, .* layer_types"),
    "an unknown rope": (tiny(rope_scaling={"rope_type": "magic"}), "magic"),
    "a rope per kind of layer": (
        tiny(rope_parameters={"full_attention": {"rope_theta": 5e5}}),
        "rope_parameters are",
    ),
    "a rope that is a list": (tiny(rope_parameters=[1]), "rope_parameters are"),
    "kinds of layers that are a number": (tiny(layer_types=5), "config.json"),
    "a block of a fraction": (tiny(block_size=7.9), "block_size is 7.9"),
    "an endless block": (tiny(block_size=float("inf")), "config.json"),
    "another activation": (tiny(hidden_act="gelu"), "hidden_act is 'gelu', supported is 'silu'"),
    "another projector": (
        dflash(projector_type="domino"),
        "projector_type is 'domino', supported is 'dflash'",
    ),
    "shifted labels": (dflash(shift_label=True), "shift_label is true, supported is false"),
    "a bias in words": (tiny(attention_bias="false"), "attention_bias is 'false', not true or"),
    "causality in words": (tiny(is_causal="false"), "is_causal is 'false', not true or false"),
    "causality as a number": (dflash(causal=0), "causal is 0, not true or false"),
    "windows in words": (dflash(use_swa="false"), "use_swa is 'false', not true or false"),
    "a head of its own in words": (dflash(own_head="false"), "own_head is 'false', not true or"),
    "an embedding of its own in words": (dflash(own_embedding="no"), "own_embedding is 'no', not"),
    "an epsilon that is no number": (tiny(rms_norm_eps=NAN), "rms_norm_eps is nan, not a finite"),
    "a negative epsilon": (tiny(rms_norm_eps=-1.0), "rms_norm_eps is -1.0, not above 0"),
    "logits of nothing": (dflash(output_multiplier=0), "output_multiplier is 0, not above 0"),
    "a scale that is no number": (dflash(input_embedding_scale=NAN), "scale is nan, not a finite"),
    "a soft cap that is no number": (dflash(final_logit_softcapping=NAN), "is nan, not a finite"),
    "a base that is no number": (tiny(rope_theta=NAN), "rope_theta is nan, not a finite number"),
    "a factor that is no number": (
        tiny(rope_scaling={"rope_type": "linear", "factor": NAN}),
        "factor of the rope is nan, not a finite number",
    ),
    **{
        f"{name} over 31 bits": (tiny(**{name: 2**31}), f"{name} is 2147483648, not up to")
        for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    },
    "heads that are too many together": (
        tiny(num_attention_heads=2**20, num_key_value_heads=1, head_dim=2**20),
        "1048576 attention heads of 1048576 are more than 2147483647",
    ),
    "key/value heads that are too many together": (
        tiny(num_attention_heads=2**16, num_key_value_heads=2**16, head_dim=2**15),
        "65536 attention heads of 32768 are more than",
    ),
    "taps that are too wide together": (
        tiny(hidden_size=2**30),
        "3 tapped layers of hidden_size 1073741824 are more than 2147483647",
    ),
    "convolutions that are too many together": (
        tiny_config(
            hidden_size=2**24,
            dflash_config={"block_size": 256, "conv_group_size": 1, "conv_kernel_size": 256},
        ),
        "two convolutions of conv_kernel_size 256 over 16777216 groups are more than",
    ),
    "a rope without its factor": (tiny(rope_scaling={"rope_type": "linear"}), "factor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_does_not_describe_a_drafter_is_refused(tmp_path, case):
    config, message = REFUSED[case]
    folder = write_config(tmp_path, config)
    with pytest.raises(DFlashError, match=message) as failure:
        load_network(folder, read_config(folder), mx.float32)
    assert str(folder) in failure.value.what
    assert "--drafter" in failure.value.next_step


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "has no config.json"),
        (b"", "cannot be read"),
        (b'{"architectures": ["DFlashDraftModel"]', "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
    ],
    ids=["missing", "empty", "cut off", "not text"],
)
def test_a_config_that_cannot_be_read_is_reported(tmp_path, contents, message):
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(DFlashError, match=message) as failure:
        read_config(tmp_path)
    assert str(tmp_path) in failure.value.what
    assert "drafter" in failure.value.next_step


Change = Callable[[dict[str, np.ndarray]], Any]
TENSORS: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"),
        r"layers.1.self_attn.k_norm.weight in .* is missing, .* asks for \(16,\)",
    ),
    "all missing": (dict.clear, "the .safetensors files in .* hold no tensors"),
    "unexpected": (
        lambda tensors: tensors.update({"lm_head.weight": np.zeros((97, 64), np.float32)}),
        r"lm_head.weight in .* is \(97, 64\), .* asks for no such tensor",
    ),
    "of a layer too many": (
        lambda tensors: tensors.update({"layers.2.mlp.up_proj.weight": tensors["norm.weight"]}),
        "layers.2.mlp.up_proj.weight .* no such tensor",
    ),
    "misshapen": (
        lambda tensors: tensors.update({"fc.weight": np.zeros((64, 128), np.float32)}),
        r"fc.weight in .* is \(64, 128\), .* asks for \(64, 192\)",
    ),
    "transposed": (
        lambda tensors: tensors.update(
            {"layers.0.mlp.up_proj.weight": np.zeros((64, 96), np.float32)}
        ),
        r"is \(64, 96\), .* asks for \(96, 64\)",
    ),
    "of whole numbers": (
        lambda tensors: tensors.update({"fc.weight": np.zeros((64, 192), np.int32)}),
        "fc.weight",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_other_than_the_config_asks_for_are_refused_unread(tmp_path, case, monkeypatch):
    change, message = TENSORS[case]
    tensors = random_drafter(tiny_drafter_config())
    change(tensors)
    write_drafter_folder(tmp_path, tiny_drafter_config(), tensors)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(DFlashError, match=message) as failure:
        load_network(tmp_path, read_config(tmp_path), mx.float32)
    assert "--drafter" in failure.value.next_step


@pytest.mark.parametrize(
    "field",
    ["intermediate_size", "vocab_size", "head_dim", "num_attention_heads", "hidden_size"],
)
def test_the_largest_sizes_are_compared_with_the_tensors_and_never_made(tmp_path, field):
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    raw = {**dflash(target_layer_ids=[0]), **heads, field: 2**31 - 1}
    if field == "num_attention_heads":
        raw["head_dim"] = 1
    write_drafter_folder(tmp_path, raw, random_drafter(tiny()))
    with pytest.raises(DFlashError, match="tensor .* is .* asks for"):
        load_network(tmp_path, read_config(tmp_path), mx.float32)
    assert [error.what for error in check_drafter(tmp_path).errors]


def test_the_check_refuses_a_folder_without_tensors_too(tmp_path):
    write_drafter_folder(tmp_path, tiny(), {})
    (error,) = check_drafter(tmp_path).errors
    assert "hold no tensors" in error.what


@pytest.mark.parametrize("with_pickles", [False, True], ids=["no file", "pickles only"])
def test_a_folder_without_safetensors_is_refused(tmp_path, with_pickles):
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if with_pickles:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(DFlashError, match="missing|safetensors"):
        load_network(tmp_path, read_config(tmp_path), mx.float32)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.999])
def test_a_truncated_file_is_reported(tmp_path, keep):
    file = write(tmp_path) / "model.safetensors"
    contents = file.read_bytes()
    file.write_bytes(contents[: int(keep * len(contents)) if isinstance(keep, float) else keep])
    with pytest.raises(DFlashError, match=f"{file.name} is damaged .*--drafter"):
        load_network(tmp_path, read_config(tmp_path), mx.float32)


def header(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [64], "data_offsets": [0, 256], **changes}
    text = json.dumps({"norm.weight": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(256)


@pytest.mark.parametrize(
    "contents",
    [
        (1 << 40).to_bytes(8, "little") + b"{}",
        header(data_offsets=[0, 1 << 30]),
        header(shape=[65]),
        header(dtype="F16"),
        header(data_offsets=[256, 0]),
        b"no safetensors at all, only a line of text",
    ],
    ids=["oversized header", "points outside", "shape", "dtype", "backwards", "text"],
)
def test_a_header_that_contradicts_its_file_is_reported(tmp_path, contents):
    (write(tmp_path) / "model.safetensors").write_bytes(contents)
    with pytest.raises(DFlashError, match=r"model\.safetensors is damaged"):
        load_network(tmp_path, read_config(tmp_path), mx.float32)
