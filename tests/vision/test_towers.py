"""What the doctor says of models that see, from their configurations and the heads of files."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.text import amount
from dflash_mlx.models.downloads import AvailableModel
from dflash_mlx.models.load import check_named, lines
from dflash_mlx.models.names import entries
from dflash_mlx.system.safetensors_header import TensorHeader
from dflash_mlx.vision import towers
from dflash_mlx.vision.eyes import KEPT
from dflash_mlx.vision.towers import described, tower_bytes
from support.models import edit_config, write_model


def told(folder) -> list[str]:
    report = check_named(PairConfig(str(folder), "none"))
    return [line.split("sees", 1)[1] for line in lines(report) if line.strip().startswith("sees")]


def test_the_doctor_tells_of_a_folder_whether_its_tower_is_there(tmp_path):
    folder = write_model(tmp_path / "model")
    assert told(folder) == [], "one that reads text alone"
    edit_config(folder, vision_config={"depth": 2})
    (line,) = told(folder)
    assert "no weights of the tower" in line
    file = str(folder / "model.safetensors")
    weights = {**mx.load(file), "vision_tower.blocks.0.weight": mx.zeros((500, 1000))}
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    (line,) = told(folder)
    assert "nothing" in line and "llama" in line, "a family whose pictures nobody tried"


@pytest.mark.parametrize("installed", [True, False])
def test_the_doctor_tells_what_a_tower_takes_and_whether_it_can_be_read(monkeypatch, installed):
    monkeypatch.setattr(towers, "find_spec", lambda name: installed or None)
    raw = {"model_type": "qwen3_vl", "vision_config": {"depth": 2}}
    line = described(raw, {"visual.blocks.0.weight": TensorHeader("F16", (500, 2000))})
    assert "2.0 MB" in line
    assert ("extra vision" in line) is not installed
    assert (amount(KEPT) in line) is installed


def test_lists_say_of_which_models_a_tower_was_published():
    told = {
        entry.name: AvailableModel(PairConfig(entry.name), 10**9, entry=entry).terms(10**12)
        for entry in entries()
    }
    assert "tower" in told["google/gemma-4-31B-it"] and "tower" in told["Qwen/Qwen3.5-9B"]
    assert "tower" not in told["Qwen/Qwen3-8B"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("vision_tower.blocks.0.attn.qkv.weight", True),
        ("model.visual.merger.mlp.0.weight", True),
        ("visual.patch_embed.proj.weight", True),
        ("model.vision_model.encoder.layers.0.weight", True),
        ("vision_embedder.patch_dense.weight", True),
        ("multi_modal_projector.linear_1.weight", True),
        ("model.connector.modality_projection.proj.weight", True),
        ("embed_vision.embedding_projection.weight", True),
        ("language_model.model.layers.0.mlp.up_proj.weight", False),
        ("model.supervision.weight", False),
    ],
)
def test_weights_of_towers_are_known_by_their_names(name, counts):
    assert tower_bytes({name: TensorHeader("F16", (3, 5))}) == 30 * counts
