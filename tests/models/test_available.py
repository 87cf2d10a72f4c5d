"""Memory that models need, and which ones this machine and the registry have."""

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_chat.picker_screen import line
from dflash_mlx.client import PairConfig, available_models, near_names
from dflash_mlx.models import library, memory
from dflash_mlx.models.names import DEFAULT_MODEL, SHIPPED, find_names, write_pair
from dflash_mlx.models.registry import entries
from dflash_mlx.models.source import Source
from support.models import write_drafter, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "model": str(write_model(root / "model")),
        "drafter": str(write_drafter(root / "drafter")),
        "wide": str(write_drafter(root / "wide", hidden_size=128)),
    }


def needed(folder: Path) -> int:
    return memory.needed(Source.of(folder))


def test_memory_needed_is_that_of_the_weights_widened_on_a_cpu(tmp_path, monkeypatch):
    weights = {"a.weight": mx.zeros((10, 100), mx.bfloat16)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert needed(tmp_path) == 4600
    monkeypatch.setattr(memory, "on_cpu", lambda: False)
    assert needed(tmp_path) == 2300
    (tmp_path / "config.json").write_text("[]")
    assert needed(tmp_path) == needed(tmp_path / "none") == 0


def test_memory_needed_by_a_pair_counts_its_drafters(folders):
    parts = [needed(Path(folder)) for folder in folders.values()]
    assert min(parts) > 0
    for count in (1, 2, 3):
        config = PairConfig(*list(folders.values())[:count])
        assert memory.needed_by(find_names(config)) == sum(parts[:count])


def test_memory_needed_by_the_default_pair_counts_the_shipped_drafters():
    alone = PairConfig(second_drafter="none")
    both, first = (memory.needed_by(find_names(config)) for config in (PairConfig(), alone))
    assert both - first == needed(SHIPPED / "smollm2-135m-variable-prefix") > 0


def test_memory_that_is_there_is_at_least_what_this_test_uses():
    assert memory.available_memory() > 50_000_000


@pytest.fixture
def no_cache(monkeypatch):
    monkeypatch.setattr(library, "cached_folders", list)


def link(folder, place, name=None):
    place.mkdir(parents=True, exist_ok=True)
    linked = place / (name or Path(folder).name)
    linked.symlink_to(folder, target_is_directory=True)
    return linked


def listed(here):
    return {candidate.name: candidate for candidate in available_models(here)}


@pytest.mark.usefixtures("no_cache")
def test_local_models_are_listed_with_the_drafter_that_fits(tmp_path, folders):
    model = str(link(folders["model"], tmp_path / "models"))
    drafter = link(folders["drafter"], tmp_path)
    link(folders["wide"], tmp_path)
    (tmp_path / "no-model").mkdir()
    found = listed(tmp_path)
    assert list(found)[:2] == [DEFAULT_MODEL, model]
    assert found[model].config == PairConfig(model, str(drafter))
    assert found[model].needs == memory.needed_by(find_names(found[model].config))
    assert f"drafter {drafter}" in line(found[model], 10**12)
    assert found[DEFAULT_MODEL].config == PairConfig()
    assert "does not fit" in line(found[DEFAULT_MODEL], 10**6)
    assert "does not fit" not in line(found[DEFAULT_MODEL], 10**12)


@pytest.mark.usefixtures("no_cache")
def test_the_registrys_pairs_are_listed_once_with_drafter_and_notes(tmp_path, folders):
    found = listed(tmp_path)
    public = [entry.name for entry in entries() if "/" in entry.drafter]
    assert list(found) == [DEFAULT_MODEL, *public]
    first, second, third = line(found["Qwen/Qwen3-8B"], 10**12).split("\n")
    assert first == "Qwen/Qwen3-8B  to download, about 4.50 GB at 4 bits"
    assert "drafter z-lab/Qwen3-8B-DFlash-b16, not verified" in second
    assert "not verified" not in line(found[DEFAULT_MODEL], 10**12)
    assert "thinking" in third
    assert "fits" in second and "does not fit" in line(found["moonshotai/Kimi-K2.5"], 10**11)
    assert not found["Qwen/Qwen3-8B"].here and found[DEFAULT_MODEL].here
    assert found["Qwen/Qwen3-8B"].config == PairConfig("Qwen/Qwen3-8B")
    local = str(link(folders["model"], tmp_path, "Qwen3-8B-4bit"))
    link(folders["drafter"], tmp_path)
    found = listed(tmp_path)
    assert "Qwen/Qwen3-8B" not in found
    assert found[local].config == PairConfig(local), "not the local drafter that happens to fit"
    assert "drafter z-lab/Qwen3-8B-DFlash-b16, to download" in line(found[local], 10**12)


def test_a_drafter_of_the_registry_that_is_in_the_cache_is_said_to_be_here(
    tmp_path, folders, monkeypatch
):
    name = "z-lab/Qwen3-8B-DFlash-b16"
    cached = Source(name, Path(folders["drafter"]), "drafter")
    monkeypatch.setattr(library, "cached_folders", lambda: [cached])
    assert f"{name} (on this machine)" in line(listed(tmp_path)["Qwen/Qwen3-8B"], 0)
    local = str(link(folders["model"], tmp_path, "Qwen3-8B-4bit"))
    candidate = listed(tmp_path)[local]
    assert "to download" not in line(candidate, 10**12)
    parts = (needed(Path(folders[part])) for part in ("model", "drafter"))
    assert candidate.needs == sum(parts)


@pytest.mark.usefixtures("no_cache")
def test_converted_pairs_are_listed_whole(tmp_path, folders):
    pair = tmp_path / "models" / "pair"
    link(folders["model"], pair, "target")
    link(folders["drafter"], pair, "drafter")
    write_pair(pair, {"target": "a/target", "drafter": "a/drafter"}, {})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "pair.json").write_text("{")
    found = listed(tmp_path)
    assert found[str(pair)].config == PairConfig(str(pair))
    assert found[str(pair)].needs > needed(Path(folders["model"]))
    assert found[str(tmp_path / "damaged")].needs == 0


@pytest.mark.usefixtures("no_cache")
def test_folders_that_cannot_be_read_are_no_models(tmp_path, folders, monkeypatch):
    """The tests may run as root, who may enter all folders, so what raises is put in place."""
    local = str(link(folders["model"], tmp_path))
    (tmp_path / "a-private").mkdir()
    (tmp_path / "a-nested").mkdir()
    (tmp_path / "a-nested" / "config.json").write_text("[" * 100_000)
    (tmp_path / "a-nested" / "pair.json").write_text("[" * 100_000)
    (tmp_path / "a-pipe").mkdir()
    for name in ("config.json", "pair.json"):
        os.mkfifo(tmp_path / "a-pipe" / name)  # opening it would wait for ever
    forbid(monkeypatch, tmp_path / "a-private")
    found = listed(tmp_path)
    assert local in found
    assert found[str(tmp_path / "a-nested")].needs == 0, "choosing it says how it is damaged"
    assert not any("private" in name or "pipe" in name for name in found)


def forbid(monkeypatch, folder):
    """Nothing in `folder` may be looked at."""

    def forbidden(function):
        def call(path, *arguments, **keywords):
            if folder in Path("" if isinstance(path, int) else path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *arguments, **keywords)

        return call

    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, forbidden(getattr(os, name)))


@pytest.mark.usefixtures("no_cache")
def test_near_names_ignore_case_and_leave_out_the_exact_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near_names("qwen/qwen3-4b")[0] == "Qwen/Qwen3-4B"
    assert "Qwen/Qwen3-4B" not in near_names("Qwen/Qwen3-4B")
    assert near_names("SmolLM2-135M-Instuct")[0] == DEFAULT_MODEL
    assert near_names("nothing like it") == []
