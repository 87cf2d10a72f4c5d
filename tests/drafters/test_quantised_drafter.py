"""Drafters with packed matrices: what is packed, what is kept, and what a folder of them says."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.network import Network
from dflash_mlx.drafters.networks.files import (
    KEPT,
    Quantization,
    parameters_of,
    quantization_of,
    quantize_network,
    save_network,
)
from support import reference_dflash2
from support.converted import assert_same_tensors
from support.drafter_formats import DRAFT_IDS, FORMATS, own_tables, speculators, version_1
from support.reference_dflash import random_drafter, write_drafter_folder

WIDE = {"intermediate_size": 128}
VERSION_1, VERSION_2 = version_1(**WIDE), reference_dflash2.tiny_config(**WIDE)
HALF = speculators(draft_vocab_size=len(DRAFT_IDS), transformer_layer_config=WIDE)
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "version 1": (VERSION_1, random_drafter(VERSION_1)),
    "version 2": (VERSION_2, reference_dflash2.random_tensors(VERSION_2)),
    "dspark": FORMATS["dspark"],
    "draft vocabulary": (HALF, {**random_drafter(VERSION_1), **own_tables(DRAFT_IDS)}),
}


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    return write_drafter_folder(tmp_path / "plain", *FOLDERS[request.param])


def saved(folder, tmp_path, bits: int, group_size: int):
    """A folder of the same drafter, packed."""
    drafter = FILES.read_drafter(folder)
    network = drafter.network()
    network.set_dtype(mx.bfloat16)
    quantize_network(network, bits, group_size)
    save_network(tmp_path / "packed", network, drafter.raw)
    return tmp_path / "packed", network


@pytest.mark.parametrize("bits", [4, 8])
def test_only_matrices_are_packed_and_the_folder_is_read_as_it_was_written(folder, tmp_path, bits):
    packed, network = saved(folder, tmp_path, bits, 32)
    config = FILES.read_config(packed)
    assert config.quantization == Quantization(32, bits)
    loaded = FILES.load_network(packed, config, mx.bfloat16, bits=4)  # not packed again
    assert quantization_of(loaded) == config.quantization
    assert_same_tensors(parameters_of(loaded), parameters_of(network))
    found = {path for path, module in loaded.named_modules() if hasattr(module, "scales")}
    matrices = {
        path
        for path, module in FILES.read_drafter(folder).network().named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not any(name in path for name in KEPT)
    }
    assert found == matrices and {"fc", "layers.0.self_attn.q_proj"} <= found


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


@pytest.mark.parametrize(
    ("says", "value"),
    [
        ({"group_size": 32, "bits": 8}, "fc.* of packed numbers, .* of packed numbers"),
        ({"group_size": 64, "bits": 4}, r"fc.biases .*\(64, 4\), .*\(64, 2\)"),
        (None, "fc.biases .* no such tensor"),
    ],
    ids=["other bits", "other groups", "not packed"],
)
def test_a_packed_folder_whose_config_says_otherwise_is_refused(tmp_path, says, value):
    plain = write_drafter_folder(tmp_path / "plain", *FOLDERS["version 1"])
    folder, _ = saved(plain, tmp_path, 4, 32)
    raw = json.loads((folder / "config.json").read_text())
    assert raw.pop("quantization") == {"group_size": 32, "bits": 4}
    raw |= {} if says is None else {"quantization": says}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DFlashError, match=value) as failure:
        FILES.load_network(folder, FILES.read_config(folder), mx.float32)
    assert "--drafter" in failure.value.next_step
