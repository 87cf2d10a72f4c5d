"""Models that an interrupted download left unfinished are not taken for whole ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download

from dflash_mlx import PairConfig
from dflash_mlx.convert import hub as convert_hub
from dflash_mlx.models import available, memory
from dflash_mlx.models.compatibility import LocalFolder
from dflash_mlx.models.compatibility.weight_files import INDEX
from dflash_mlx.models.compatibility.whole import TARGET_WEIGHTS, is_whole, whole_snapshot
from dflash_mlx.models.pair_report import check_named
from support.drafter_formats import write_shards
from support.hub_server import COMMIT, Hub, serve
from support.models import drafter_config, write_model
from support.reference_dflash import random_drafter

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def write_target(folder: Path) -> Path:
    """A target in two files, with what load does not fetch or read beside them."""
    write_model(folder)
    stored: Any = mx.load(str(folder / "model.safetensors"))
    names = sorted(stored)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    for file, part in zip(SHARDS, (names[:10], names[10:]), strict=True):
        mx.save_safetensors(str(folder / file), {name: stored[name] for name in part})
    (folder / "original").mkdir()
    shutil.copy(folder / SHARDS[0], folder / "original" / "model.safetensors")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve({"owner/model": write_target(tmp_path / "model")}) as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(memory, "on_cpu", lambda: False)
        yield served


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


def listed_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    folder = Path(constants.HF_HUB_CACHE) / "models--owner--model" / "snapshots" / COMMIT
    revision = SimpleNamespace(last_modified=1, snapshot_path=folder)
    repo = SimpleNamespace(repo_type="model", repo_id="owner/model", revisions=[revision])
    monkeypatch.setattr(available, "scan_cache_dir", lambda: SimpleNamespace(repos=[repo]))
    return [found.name for found in available.cached_folders()]


def test_a_folder_is_whole_with_all_shards_and_all_that_its_index_names(tmp_path):
    folder = write_shards(tmp_path / "a", drafter_config(), random_drafter(drafter_config()))
    assert is_whole(folder)
    for file in [file for file in folder.iterdir() if file.name != INDEX]:
        contents = file.read_bytes()
        file.unlink()
        assert not is_whole(folder), file.name
        file.write_bytes(contents)
    (folder / INDEX).write_text("[")
    assert not is_whole(folder)
    assert not is_whole(tmp_path / "nowhere")


def test_a_target_is_not_whole_with_other_libraries_weights_alone(tmp_path):
    folder = write_target(tmp_path / "model")
    assert is_whole(folder, TARGET_WEIGHTS)
    for file in SHARDS:
        (folder / file).unlink()
    assert not is_whole(folder, TARGET_WEIGHTS)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("files", [["config.json"], ["config.json", SHARDS[0]], SHARDS])
def test_half_a_download_is_no_model_anywhere(tmp_path, monkeypatch, files):
    for file in files:
        hf_hub_download("owner/model", file)
    whole = memory.needed(tmp_path / "model", TARGET_WEIGHTS)
    assert listed_in_the_cache(monkeypatch) == []
    assert memory.needed_by_name("owner/model", TARGET_WEIGHTS) == pytest.approx(whole, rel=0.05)
    with monkeypatch.context() as patches:
        go_offline(patches)
        assert convert_hub.cached("owner/model") is None
    report = check_named(PairConfig("owner/model"))
    assert not report.errors
    assert not isinstance(report.target.source, LocalFolder)


@pytest.mark.usefixtures("hub")
def test_a_finished_download_is_a_model_everywhere_also_without_a_network(tmp_path, monkeypatch):
    patterns = ["*.json", TARGET_WEIGHTS]
    folder = Path(snapshot_download("owner/model", allow_patterns=patterns))
    go_offline(monkeypatch)
    assert whole_snapshot("owner/model", TARGET_WEIGHTS) == folder
    assert convert_hub.cached("owner/model") == folder
    assert listed_in_the_cache(monkeypatch) == ["owner/model"]
    whole = memory.needed(tmp_path / "model", TARGET_WEIGHTS)
    assert memory.needed_by_name("owner/model", TARGET_WEIGHTS) == whole
    report = check_named(PairConfig("owner/model"))
    assert isinstance(report.target.source, LocalFolder)
    assert not report.errors


@pytest.mark.usefixtures("hub")
def test_memory_counts_of_a_repository_what_would_be_loaded(tmp_path):
    sizes = {file: (tmp_path / "model" / file).stat().st_size for file in SHARDS}
    found = memory.needed_by_name("owner/model", TARGET_WEIGHTS)
    assert found == int(sum(sizes.values()) * 1.15)
    assert memory.needed_by_name("owner/none", TARGET_WEIGHTS) == 0
