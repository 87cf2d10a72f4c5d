"""What there is to choose among models, and what each takes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.client import (
    AvailableModel,
    PairConfig,
    available_models,
    grouped,
    near_names,
)
from dflash_mlx.models import downloads, library
from dflash_mlx.models.downloads import bits_of, loaded_bytes, stored_bytes, weights_of
from dflash_mlx.models.names import DEFAULT_MODEL, SHIPPED, Entry, entries, find_names
from dflash_mlx.models.source import Source
from dflash_mlx.system.machine import available_memory

TARGET, FORK, DRAFTER, OTHER = "owner/model", "fork/model", "owner/drafter", "owner/other"
LM_STUDIO = library._LM_STUDIO  # before it is emptied for tests
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}


# Sizes


def needed(folder: Path | str) -> int:
    return downloads.needed(Source.of(Path(folder)))


def needed_by(config: PairConfig) -> int:
    return downloads.needed_by(find_names(config))


def test_memory_needed_is_that_of_the_weights_widened_on_a_cpu(tmp_path, monkeypatch):
    weights = {"a.weight": mx.zeros((10, 100), mx.bfloat16)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert needed(tmp_path) == 4600
    monkeypatch.setattr(downloads, "on_cpu", lambda: False)
    assert needed(tmp_path) == 2300
    (tmp_path / "config.json").write_text("[]")
    assert needed(tmp_path) == needed(tmp_path / "none") == 0
    assert available_memory() > 50_000_000


def test_memory_needed_by_a_pair_counts_its_drafters(folders):
    parts = [needed(folder) for folder in folders.values()]
    assert min(parts) > 0
    for count in (1, 2, 3):
        assert needed_by(PairConfig(*list(folders.values())[:count])) == sum(parts[:count])
    second = needed(SHIPPED / "smollm2-135m-variable-prefix")
    assert needed_by(PairConfig()) - needed_by(PairConfig(second_drafter="none")) == second > 0


@pytest.mark.parametrize(
    ("name", "weights", "bits"),
    [
        ("Qwen/Qwen3-4B", 4e9, 16),
        ("mlx-community/Qwen3-4B-4bit", 4e9, 4),
        ("someone/Qwen3-8B-MLX-8-bit", 8e9, 8),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6, 16),
        ("moonshotai/Kimi-K2.5", 0, 16),
        ("./gemma-4-12B-it-float32/", 12e9, 32),
        ("someone/Qwen3.5-27B-oQ4e", 27e9, 4),
        ("someone/Qwen3.6-27B-UD-Q6_K_XL-mlx", 27e9, 6),
        ("someone/gemma-4-31B-it-qat-q4_0", 31e9, 4),
        ("someone/Qwen3.5-9B-mlx-mixed_4_6", 9e9, 4),
    ],
)
def test_a_name_tells_how_many_weights_there_are_and_their_bits(name, weights, bits):
    assert (weights_of(name), bits_of(name)) == (weights, bits)


def test_weights_take_their_bits_and_scales_on_disk_and_32_bits_on_a_cpu():
    assert weights_of("Qwen/Qwen3-4B", 1000) == 1e12, "what is said goes before"
    assert all(weights_of(entry.name, entry.billions) > 1e8 for entry in entries())
    assert (stored_bytes(8e9, 4), stored_bytes(8e9, 16)) == (4_500_000_000, 16_000_000_000)
    assert loaded_bytes(16e9, 16, on_cpu=False) == pytest.approx(1.15 * 16e9)
    four, sixteen = loaded_bytes(4.5e9, 4, on_cpu=True), loaded_bytes(16e9, 16, on_cpu=True)
    assert four == pytest.approx(sixteen) == pytest.approx(1.15 * 32e9)


# What there is to choose


@pytest.fixture
def cached(monkeypatch):
    """What is in the cache, nothing at first."""
    found = []
    monkeypatch.setattr(library, "cached_folders", lambda: found)
    return found


def link(folder, place, name=None):
    place.mkdir(parents=True, exist_ok=True)
    linked = place / (name or Path(folder).name)
    linked.symlink_to(folder, target_is_directory=True)
    return linked


def listed(here):
    return {candidate.name: candidate for candidate in available_models(here)}


def test_a_small_model_that_drafts_is_on_this_machine_though_it_is_a_target(
    tmp_path, folders, cached
):
    name = "mlx-community/Qwen2.5-Coder-0.5B-Instruct-4bit"
    cached.append(Source(name, Path(folders["model"]), "model"))
    public = listed(tmp_path)["Qwen/Qwen2.5-Coder-32B-Instruct"]
    assert (public.drafter, public.drafts) == (name, "here")
    local = str(link(folders["model"], tmp_path, "Qwen2.5-Coder-32B-Instruct-4bit"))
    candidate = listed(tmp_path)[local]
    assert candidate.here and candidate.drafts == "here"
    assert candidate.needs == 2 * needed(folders["model"])


def test_local_models_are_listed_with_the_downloaded_drafter_that_fits(tmp_path, folders, cached):
    model = str(link(folders["model"], tmp_path / "models"))
    drafter = link(folders["drafter"], tmp_path)
    link(folders["wide"], tmp_path)
    (tmp_path / "no-model").mkdir()
    found = listed(tmp_path)
    assert list(found)[:2] == [DEFAULT_MODEL, model]
    assert found[model].config == PairConfig(model), "a folder may hold somebody's trial"
    assert found[model].drafts == "lookup"
    cached.append(Source("owner/drafter", drafter, "drafter"))
    assert listed(tmp_path)[model].config == PairConfig(model, "owner/drafter")
    assert listed(tmp_path)[model].drafts == "here"
    assert found[DEFAULT_MODEL].config == PairConfig()
    for installed, fits in ((10**6, False), (10**12, True)):
        assert found[DEFAULT_MODEL].fits(installed) == fits
        assert ("!" in found[DEFAULT_MODEL].cells(installed, 0)[1]) != fits


def test_the_registrys_pairs_are_listed_once_with_drafter_and_notes(tmp_path, folders, cached):
    found = listed(tmp_path)
    public = [entry.name for entry in entries() if "/" in entry.drafter]
    assert list(found) == [DEFAULT_MODEL, *public]
    name = "z-lab/Qwen3-8B-DFlash-b16"
    qwen = found["Qwen/Qwen3-8B"]
    assert qwen.cells(10**12, 0)[0] == " 4.50 GB"
    assert (qwen.drafter, qwen.drafts, qwen.entry.verified) == (name, "to download", False)
    assert "thinking" in qwen.entry.notes
    assert not found["moonshotai/Kimi-K2.5"].fits(10**11)
    assert not found["Qwen/Qwen3-8B"].here and found[DEFAULT_MODEL].here
    assert found["Qwen/Qwen3-8B"].config == PairConfig("Qwen/Qwen3-8B")
    cached.append(Source(name, Path(folders["drafter"]), "drafter"))
    assert listed(tmp_path)["Qwen/Qwen3-8B"].drafts == "here"
    local = str(link(folders["model"], tmp_path, "Qwen3-8B-4bit"))
    candidate = listed(tmp_path)[local]
    assert candidate.drafts == "here"
    assert candidate.needs == needed(folders["model"]) + needed(folders["drafter"])
    cached.clear()
    link(folders["drafter"], tmp_path)
    found = listed(tmp_path)
    assert "Qwen/Qwen3-8B" not in found
    assert found[local].config == PairConfig(local), "not the local drafter that happens to fit"
    assert (found[local].drafter, found[local].drafts) == (name, "to download")


@pytest.mark.parametrize(
    ("memory", "name"),
    [(8, "Qwen3-4B"), (16, "Qwen3-8B"), (24, "Qwen3-14B"), (36, "Qwen3.6-27B"), (64, "Qwen3-32B")],
)
@pytest.mark.usefixtures("cached")
def test_each_size_of_mac_has_a_recommended_model_that_fits(memory, name, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "on_cpu", lambda: False)
    models, installed = available_models(tmp_path), memory * 2**30
    groups, best = grouped(models, installed, 10e12)
    assert best is not None and best.short == name and best.fits(installed)
    here, fits, large = groups.values()
    assert sorted([*here, *fits, *large], key=models.index) == models
    assert fits[0] is best
    assert max(each.needs for each in fits) <= installed * 2 / 3 < min(each.needs for each in large)
    assert grouped(models, installed, 1e9)[1] is None, "all would be slower than one reads"


def test_speed_is_that_of_reading_the_weights_which_a_token_takes():
    def speed(name, **about):
        model = AvailableModel(PairConfig(name), 115 * 10**9, entry=Entry((), "", **about))
        return model.speed(10e9)

    assert speed("a/M-50B") == pytest.approx(0.1)
    assert speed("a/M-50B-A5B-4bit") == pytest.approx(1.0)
    assert speed("a/M", billions=50, active=10) == pytest.approx(0.5)
    assert AvailableModel(PairConfig("a/M")).speed(10e9) == 0, "where its size is not known"


@pytest.mark.usefixtures("cached")
def test_models_of_lm_studio_are_listed_where_this_program_can_load_them(
    tmp_path, folders, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(library, "_LM_STUDIO", LM_STUDIO)
    old = link(folders["model"], tmp_path / ".cache" / "lm-studio" / "models" / "owner", "old")
    new = link(folders["model"], tmp_path / ".lmstudio" / "models" / "owner", "new")
    gguf = tmp_path / ".lmstudio" / "models" / "owner" / "gguf"
    gguf.mkdir()
    (gguf / "model-Q4_K_M.gguf").touch()
    found = listed(tmp_path / "none")
    assert {str(old), str(new)} <= found.keys() and str(gguf) not in found
    assert found[str(new)].here
    inside = [model.name for model in available_models(new.parent)]
    assert inside.count(str(new)) == 1, "also where the chat is started in that folder"
    shutil.rmtree(tmp_path / ".cache")
    link(tmp_path / ".lmstudio", tmp_path / ".cache", "lm-studio")
    (new.parent.parent / "loop").symlink_to(".")
    once = [name for name in listed(tmp_path / "none") if name.endswith("/new")]
    assert once == [str(new)], "the older place is a link to the newer one"


@pytest.mark.usefixtures("cached")
def test_unreadable_folders_are_never_listed(tmp_path, folders, monkeypatch):
    """The tests may run as root, who may enter all folders, so what raises is put in place."""
    local = str(link(folders["model"], tmp_path))
    for name in ("a-private", "a-nested", "a-pipe"):
        (tmp_path / name).mkdir()
    (tmp_path / "a-nested" / "config.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "a-pipe" / "config.json")  # opening it would wait for ever
    forbid(monkeypatch, tmp_path / "a-private")
    found = listed(tmp_path)
    assert local in found
    assert not any(name.startswith(str(tmp_path / "a-")) for name in found)


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


@pytest.mark.usefixtures("cached")
def test_near_names_ignore_case_and_leave_out_the_exact_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert near_names("qwen/qwen3-4b")[0] == "Qwen/Qwen3-4B"
    assert near_names("Qwen/Qwen3-4B") == [], "it was not mistyped"
    assert near_names("SmolLM2-135M-Instuct")[0] == DEFAULT_MODEL
    assert near_names("nothing like it") == []
