"""Conversions of Hugging Face ids, against a hub on this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from dflash_mlx.convert.__main__ import main
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.names import read_pair
from support.converted import assert_same_tensors, tensors
from support.drafter_formats import FORMATS
from support.hub_server import Hub, serve, use_hub
from support.models import ask_for_code, write_drafter, write_model
from support.reference_dflash import write_drafter_folder


def in_bfloat16(drafter: Path) -> Path:
    weights = {name: array.astype(mx.bfloat16) for name, array in tensors(drafter).items()}
    mx.save_safetensors(str(drafter / "model.safetensors"), weights)
    return drafter


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with a target and a drafter, and an empty cache."""
    repositories = {
        "owner/model": write_model(tmp_path / "hub" / "model"),
        "owner/drafter": in_bfloat16(write_drafter(tmp_path / "hub" / "drafter")),
        "owner/speculators": write_drafter_folder(
            tmp_path / "hub" / "speculators", *FORMATS["speculators, draft vocabulary"]
        ),
    }
    (tmp_path / "out").mkdir()
    with serve(repositories, tmp_path / "cache") as served:
        yield served


def test_a_repository_converts_as_the_folder_it_serves(hub, tmp_path):
    """With its licence; copies of the weights for other libraries are left out."""
    folder = hub.repositories["owner/model"]
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "LICENSE").write_text("free")
    main(["owner/model", str(tmp_path / "out" / "dst")])
    main([str(folder), str(tmp_path / "out" / "local")])
    local = {f.name: f.read_bytes() for f in (tmp_path / "out" / "local").iterdir()}
    remote = {f.name: f.read_bytes() for f in (tmp_path / "out" / "dst").iterdir()}
    assert remote == local
    assert "consolidated.safetensors" not in remote
    assert remote["LICENSE"] == b"free"
    assert [r for r in hub.requests if "consolidated" in r[1]] == []


def test_a_pair_of_repositories_keeps_their_names_and_is_not_fetched_again(hub, tmp_path):
    main(["owner/model", str(tmp_path / "out" / "dst"), "--pair", "owner/drafter"])
    pair = tmp_path / "out" / "dst"
    assert read_pair(pair) == {"target": "owner/model", "drafter": "owner/drafter"}
    assert_same_tensors(tensors(pair / "drafter"), tensors(hub.repositories["owner/drafter"]))
    hub.requests.clear()
    main(["owner/model", str(tmp_path / "out" / "second"), "--pair", "owner/drafter"])
    assert {method for method, _, _ in hub.requests} <= {"HEAD"}


# A dry run


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("owner/model", [], "target    owner/model: llama in float32, "),
        (
            "owner/model",
            ["--bits", "4"],
            "target .*: llama in 4 bits, ",
        ),
        (
            "owner/drafter",
            [],
            "drafter   owner/drafter: DFlashDraftModel in bfloat16, blocks of 8, ",
        ),
        ("owner/speculators", [], "drafter .*: DFlashDraftModel in float32, blocks of 6, "),
    ],
)
def test_a_dry_run_fetches_heads_only_and_foretells_what_is_written(
    hub, tmp_path, capsys, name, options, words
):
    arguments = [name, str(tmp_path / "out" / "dst"), *options]
    main([*arguments, "--check"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in rest] == ["disk", "download", "memory"]
    assert hub.fetched() == ["bytes=0-100000"]
    stored = hub.repositories[name] / "model.safetensors"
    cached = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert stored.stat().st_size not in [file.stat().st_size for file in cached]
    assert list((tmp_path / "out").iterdir()) == []
    main(arguments)
    written = tensors(tmp_path / "out" / "dst").values()
    size = sum(array.nbytes for array in written)
    assert re.match(words, first)
    if "--bits" not in options:  # of a quantised target the size is about
        assert first.endswith(f" {size / 1000:.1f} kB")


def test_a_download_that_does_not_fit_is_refused_before_it_begins(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(DFlashError, match=r"the download needs .* MB, .* 1\.0 MB"):
        main(["owner/model", str(tmp_path / "out" / "dst")])
    assert hub.fetched() == ["bytes=0-100000"]


# What cannot be had


def test_without_a_network_what_is_in_the_cache_still_converts(hub, tmp_path, monkeypatch):
    folder = hub.repositories["owner/model"]
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    main(["owner/model", str(tmp_path / "out" / "online")])
    with pytest.raises(DFlashError, match="'owner/nonesuch' .* public model"):
        main(["owner/nonesuch", str(tmp_path / "out" / "dst")])
    use_hub(monkeypatch)
    main(["owner/model", str(tmp_path / "out" / "offline")])
    assert_same_tensors(tensors(tmp_path / "out" / "offline"), tensors(tmp_path / "out" / "online"))
    with pytest.raises(DFlashError, match="owner/drafter .* hub cannot be reached"):
        main(["owner/drafter", str(tmp_path / "out" / "other")])


def pickle_it(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "value"),
    [
        (pickle_it, "owner/model .*pytorch_model.bin can run code"),
        (ask_for_code, "owner/model .*'model.py'"),
        (lambda folder: (folder / "config.json").unlink(), "owner/model has no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "owner/model .*tokenizer.json"),
    ],
    ids=["pickled", "code", "no config", "no tokenizer"],
)
def test_what_is_refused_of_a_folder_is_refused_before_it_is_fetched(hub, tmp_path, damage, value):
    damage(hub.repositories["owner/model"])
    for options in ([], ["--check"]):
        with pytest.raises(DFlashError, match=value):
            main(["owner/model", str(tmp_path / "out" / "dst"), *options])
    assert None not in hub.fetched()
    assert list((tmp_path / "out").iterdir()) == []
