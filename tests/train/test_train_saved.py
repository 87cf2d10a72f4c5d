"""A saved drafter is what was trained, rounded to bfloat16, or is not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from safetensors import safe_open

from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.train.trainee import Trainee
from support.tiny_training import (
    drafter_config,
    files,
    full_disk,
    make_trainee,
    sliding,
    tiny_target,
)

CONFIGS = {
    "mixed": drafter_config(**sliding("SFS", 6), is_causal=False),
    "biased": drafter_config(attention_bias=True),
    "unknown fields": drafter_config(
        note={"by": [1, "me"]}, dflash={"training_mode": "vp_drafter"}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_drafter_is_read_back_rounded_to_bfloat16(tmp_path, name):
    saved = Trainee.fresh(CONFIGS[name], tiny_target(), seed=1)
    folder = tmp_path / "Drafter für mich"
    saved.save(folder)
    found, expected = Trainee.read(folder, tiny_target()).weights(), saved.weights()
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        rounded = array.astype(mx.bfloat16).astype(mx.float32)
        assert mx.array_equal(found[path], rounded).item()
    assert any(not mx.array_equal(found[path], expected[path]).item() for path in expected)
    raw = json.loads((folder / "config.json").read_text())
    assert raw == {**CONFIGS[name], "dtype": "bfloat16"}
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_saving_again_replaces_what_was_there_and_a_full_disk_leaves_it(tmp_path):
    first, second = make_trainee(seed=1), make_trainee(seed=2)
    first.save(tmp_path / "a")
    second.save(tmp_path / "a")
    second.save(tmp_path / "b")
    before = files(tmp_path / "a")
    assert before == files(tmp_path / "b")
    with full_disk(20_000), pytest.raises(OSError):
        first.save(tmp_path / "a")
    assert files(tmp_path / "a") == before


def test_a_full_disk_leaves_the_text_that_was_there(tmp_path):
    replace_text(tmp_path / "config.json", "before")
    with full_disk(100), pytest.raises(OSError):
        replace_text(tmp_path / "config.json", "after " * 1000)
    assert files(tmp_path) == {"config.json": b"before"}


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
