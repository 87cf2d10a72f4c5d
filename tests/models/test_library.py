"""What lies on the disk is listed by name, and removed alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.utils import WeakFileLock

from dflash_mlx.client import DFlashError, cache_entries, remove_entry
from dflash_mlx.models.default_model import DEFAULT_TARGET, fetch
from dflash_mlx.models.library import being_written, find_entries
from dflash_mlx.models.names import DEFAULT_MODEL, write_pair
from support.hub_server import Hub, serve
from support.models import write_drafter, write_model

TARGET, FORK, DRAFTER, OTHER = "owner/model", "fork/model", "owner/drafter", "owner/other"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """Of target, its fork, a drafter, and something else, everything is in the cache."""
    model = write_model(tmp_path / "served")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "diffusion_pytorch_model.safetensors").write_bytes(b"another program reads these")
    folders = {TARGET: model, FORK: model, OTHER: other}
    folders[DRAFTER] = write_drafter(tmp_path / "served-drafter")
    with serve(folders, tmp_path / "hub") as served:
        for name in folders:
            snapshot_download(name)
        yield served


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a converted pair and a model of the user's own."""
    here = tmp_path / "here"
    write_model(here / "own")
    write_model(here / "pair" / "target")
    write_drafter(here / "pair" / "drafter")
    write_pair(here / "pair", {"target": "a/b", "drafter": "a/c"}, {})
    return here


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """With one of everything that this program keeps."""
    cache = tmp_path / "cache"
    for folder in ("timing", "kernels", "features/corpus", "prefixes", "download-x"):
        (cache / folder).mkdir(parents=True)
    (cache / DEFAULT_TARGET.file_name).write_bytes(b"x" * 1000)
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
        ("converted", str(here / "pair")),
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


def test_half_a_download_is_called_unfinished(hub, cache, tmp_path):
    (snapshot,) = (tmp_path / "hub").glob("models--owner--model/snapshots/*")
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    part = next((tmp_path / "hub").glob("models--owner--model/blobs")) / "1.incomplete"
    part.write_bytes(b"z" * 300)
    for each in (part, part.parent):  # nobody has written into it for long
        os.utime(each, (1, 1))
    found = find_entries([TARGET], cache_entries(tmp_path / "none", cache))
    unfinished = [(each.size == 300, each.repository) for each in found[:2]]
    assert sorted(unfinished) == [(False, True), (True, False)]
    assert {each.kind for each in found[:2]} == {"unfinished"}
    for each in found:
        remove_entry(each)
    assert find_entries(["unfinished"], cache_entries(tmp_path / "none", cache / "none")) == []


def test_what_another_program_downloads_is_left_alone_until_it_is_done(hub, cache, tmp_path):
    (snapshot,) = (tmp_path / "hub").glob("models--owner--model/snapshots/*")
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
    part = blobs / "1.incomplete"
    part.write_bytes(b"z")

    def refused() -> int:
        found = find_entries(["unfinished"], cache_entries(tmp_path / "none", cache))
        busy = [each for each in found if being_written(each)]
        for each in busy:
            with pytest.raises(DFlashError, match="is being downloaded"):
                remove_entry(each)
            assert each.path.exists()
        return len(busy)

    assert refused() == 2, "it has just changed"
    for each in (part, blobs):
        os.utime(each, (1, 1))
    assert refused() == 0
    with WeakFileLock(tmp_path / "hub" / ".locks" / "models--owner--model" / "1.lock"):
        assert refused() == 2, "however long ago, as with a slow connection"
    assert refused() == 0


def test_the_folder_that_pip_fills_is_left_alone(tmp_path):
    def download(folder: Path, _: str) -> Path:
        (found,) = find_entries(["unfinished"], cache_entries(tmp_path, tmp_path))
        assert found.path == folder and being_written(found)
        raise DFlashError("it was looked at", "stop")

    with pytest.raises(DFlashError, match="looked at"):
        fetch(tmp_path, download=download)


@pytest.mark.usefixtures("hub")
def test_an_older_revision_that_is_whole_keeps_a_repository_from_being_unfinished(cache, tmp_path):
    (snapshot,) = (tmp_path / "hub").glob("models--owner--model/snapshots/*")
    older = shutil.copytree(snapshot, snapshot.with_name("0" * 40))
    for file in older.iterdir():
        os.utime(file, (1, 1))
    (snapshot / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    found = cache_entries(tmp_path / "none", cache)
    assert [each.kind for each in found if each.name == TARGET and each.repository] == ["model"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["calibrations"], ["calibration", "calibration"]),
        (["calibration"], ["calibration", "calibration"]),
        ([TARGET.upper()], ["model", "calibration", "kernels"]),
        (["features", "emulator"], ["features"]),
        ([DRAFTER, "drafters"], ["drafter"]),
    ],
)
@pytest.mark.usefixtures("hub")
def test_names_and_kinds_find_what_is_kept_once_each(here, cache, names, expected):
    assert [each.kind for each in find_entries(names, cache_entries(here, cache))] == expected


@pytest.mark.usefixtures("hub")
def test_a_name_of_nothing_is_refused_and_so_is_the_kind_of_the_users_own(here, cache):
    kept = cache_entries(here, cache)
    for name in ("owner/none", "folder", "folders", ""):
        with pytest.raises(DFlashError, match=f"'{name}'"):
            find_entries([TARGET, name], kept)


@pytest.mark.usefixtures("hub")
def test_a_repository_is_removed_without_the_fork_that_has_the_same_revision(here, cache):
    (target,) = [
        each for each in cache_entries(here, cache) if (each.kind, each.name) == ("model", TARGET)
    ]
    remove_entry(target)
    left = {each.name for each in cache_entries(here, cache) if each.kind == "model"}
    assert left == {FORK, DEFAULT_MODEL}
    assert not target.path.exists()
    remove_entry(target)  # another program was quicker


@pytest.mark.usefixtures("hub")
def test_all_that_may_be_removed_is_and_the_users_own_stays(here, cache):
    for each in cache_entries(here, cache):
        if each.kind == "folder":
            with pytest.raises(DFlashError, match="own"):
                remove_entry(each)
        else:
            remove_entry(each)
    assert [each.kind for each in cache_entries(here, cache)] == ["folder"]
    assert not (here / "pair").exists()


def test_a_link_to_a_pair_goes_and_the_pair_stays(here, cache, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "pair"
    link.symlink_to(here / "pair", target_is_directory=True)
    (found,) = [
        each for each in cache_entries(tmp_path / "links", cache) if each.kind == "converted"
    ]
    remove_entry(found)
    assert not os.path.lexists(link)
    assert (here / "pair" / "pair.json").is_file()


def test_what_cannot_be_removed_is_named(cache, here, monkeypatch):
    (found,) = [each for each in cache_entries(here, cache) if each.kind == "kernels"]

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DFlashError, match="Permission denied") as failure:
        remove_entry(found)
    assert str(found.path) in failure.value.what
