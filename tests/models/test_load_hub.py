"""Pairs from a hub on this machine: what does not fit is refused before its weights are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from dflash_mlx import DecodeConfig, DFlashError, PairConfig, load
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.stream import generate
from support.hub_server import Hub, serve
from support.models import edit_config, write_drafter, write_model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a target and a drafter, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folders = {
        "owner/model": write_model(tmp_path / "model"),
        "owner/drafter": write_drafter(tmp_path / "drafter"),
        "owner/wide": write_drafter(tmp_path / "wide", hidden_size=128),
        "z-lab/Qwen3-4B-DFlash-b16": write_drafter(tmp_path / "other", hidden_size=128),
        "Qwen/Qwen3-4B": write_model(tmp_path / "known"),
    }
    with serve(folders) as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


def weights_fetched(hub: Hub) -> int:
    """Requests for whole weight files; their heads are asked for by range."""
    return sum(
        method == "GET" and file.endswith(".safetensors") and asked is None
        for method, file, asked in hub.requests
    )


def test_a_pair_on_the_hub_is_fetched_and_decodes(hub):
    pair = load("owner/model", "owner/drafter")
    assert (pair.target.name, pair.drafter_name) == ("owner/model", "owner/drafter")
    answer = generate(pair, "hello", DecodeConfig("dflash", max_tokens=5))
    assert answer.statistics.method == "dflash"
    assert weights_fetched(hub) == 2
    assert load("owner/model", "owner/drafter").means.drafters == 1
    assert weights_fetched(hub) == 2


REFUSED = {
    "a drafter of another target": (lambda hub: None, "owner/wide", "hidden_size 128"),
    "a target as drafter": (lambda hub: None, "owner/model", "is a target, not a drafter"),
    "a family that nobody knows": (
        lambda hub: edit_config(hub.repositories["owner/model"], model_type="nonesuch"),
        "owner/drafter",
        "nonesuch",
    ),
    "no config": (
        lambda hub: (hub.repositories["owner/drafter"] / "config.json").unlink(),
        "owner/drafter",
        "owner/drafter has no config.json",
    ),
    "a tensor too much": (
        lambda hub: edit_config(hub.repositories["owner/drafter"], num_hidden_layers=1),
        "owner/drafter",
        "owner/drafter",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_serve_is_refused_before_any_weight_is_fetched(hub, case):
    damage, drafter, message = REFUSED[case]
    damage(hub)
    with pytest.raises(DFlashError, match=message):
        load("owner/model", drafter)
    assert weights_fetched(hub) == 0


def test_a_target_alone_is_checked_before_it_is_fetched(hub):
    edit_config(hub.repositories["owner/model"], model_file="model.py")
    with pytest.raises(DFlashError, match="its own Python file"):
        load("owner/model")
    assert weights_fetched(hub) == 0


def test_a_drafter_that_is_done_without_is_not_fetched(hub):
    pair = load_pair(PairConfig("Qwen/Qwen3-4B"), DecodeConfig())
    assert "hidden_size 128" in pair.undrafted
    assert weights_fetched(hub) == 1
