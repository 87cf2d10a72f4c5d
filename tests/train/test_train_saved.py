"""A saved drafter is what was trained, rounded to bfloat16, or is not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open

from dflash_mlx.drafters.dflash.checkpoint import load_network, parse_config, read_config
from dflash_mlx.drafters.dflash.network import Network
from dflash_mlx.drafters.dflash.save import save_drafter
from dflash_mlx.system.files import replace_safetensors, replace_text
from support.tiny_training import drafter_config, files, full_disk, make_network, sliding

CONFIGS = {
    "full": drafter_config(),
    "mixed": drafter_config(**sliding("SFS", 6), is_causal=False),
    "biased": drafter_config(attention_bias=True),
    "unknown fields": drafter_config(
        note={"by": [1, "me"]}, dflash={"training_mode": "vp_drafter"}
    ),
}


def weights(network: Network) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


def network_of(name: str) -> Network:
    network = Network(parse_config(CONFIGS[name], name))
    mx.eval(network.parameters())
    return network


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_drafter_is_read_back_rounded_to_bfloat16(tmp_path, name):
    raw, network = CONFIGS[name], network_of(name)
    save_drafter(tmp_path / "drafter", network, raw)
    config = read_config(tmp_path / "drafter")
    found = weights(load_network(tmp_path / "drafter", config, mx.float32))
    expected = weights(network)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        rounded = array.astype(mx.bfloat16).astype(mx.float32)
        assert mx.array_equal(found[path], rounded).item()
    assert any(not mx.array_equal(found[path], expected[path]).item() for path in expected)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text()) == {
        **raw,
        "dtype": "bfloat16",
    }


def test_a_saved_folder_holds_two_files_in_the_published_format(tmp_path):
    save_drafter(tmp_path, network_of("full"), CONFIGS["full"])
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_saving_again_replaces_what_was_there(tmp_path):
    save_drafter(tmp_path, make_network(CONFIGS["full"], seed=1)[0], {**CONFIGS["full"], "a": 1})
    save_drafter(tmp_path, make_network(CONFIGS["full"], seed=2)[0], CONFIGS["full"])
    fresh = tmp_path / "fresh"
    save_drafter(fresh, make_network(CONFIGS["full"], seed=2)[0], CONFIGS["full"])
    expected = files(fresh)
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected


@pytest.mark.parametrize("room", [0, 100, 5000])
def test_a_full_disk_leaves_the_weights_that_were_there(tmp_path, room):
    file = tmp_path / "arrays.safetensors"
    arrays = {"a": mx.arange(5000), "b": mx.zeros((3, 7))}
    replace_safetensors(file, arrays, {})
    before = files(tmp_path)
    with full_disk(room), pytest.raises(OSError):
        replace_safetensors(file, {"a": mx.arange(9000)}, {})
    assert files(tmp_path) == before
    found = mx.load(str(file))
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_a_file_that_was_cut_without_a_word_does_not_replace_another(tmp_path, monkeypatch):
    file = tmp_path / "arrays.safetensors"
    replace_safetensors(file, {"a": mx.arange(50)}, {})
    before = files(tmp_path)

    def save_half(name: str, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
        Path(name).write_bytes(b"a" * (arrays["a"].nbytes // 2))

    monkeypatch.setattr(mx, "save_safetensors", save_half)
    with pytest.raises(OSError, match="No space left"):
        replace_safetensors(file, {"a": mx.arange(90)}, {})
    assert files(tmp_path) == before


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_leaves_the_text_that_was_there(tmp_path, room):
    replace_text(tmp_path / "config.json", "before")
    with full_disk(room), pytest.raises(OSError):
        replace_text(tmp_path / "config.json", "after " * 100)
    assert files(tmp_path) == {"config.json": b"before"}


def test_a_full_disk_leaves_the_drafter_that_was_there(tmp_path):
    save_drafter(tmp_path, network_of("full"), CONFIGS["full"])
    before = files(tmp_path)
    with full_disk(20_000), pytest.raises(OSError):
        save_drafter(tmp_path, make_network(CONFIGS["full"], seed=2)[0], {})
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_drafter(tmp_path / "file", network_of("full"), CONFIGS["full"])


def test_names_with_other_letters_are_written(tmp_path):
    replace_text(tmp_path / "Ä.json", "ü")
    assert (tmp_path / "Ä.json").read_text(encoding="utf-8") == "ü"
    folder: Path = tmp_path / "Drafter für mich"
    save_drafter(folder, network_of("full"), CONFIGS["full"])
    load_network(folder, read_config(folder), mx.float32)
