"""Models and drafters that are not there: one sentence each, which names the option."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from dflash_mlx import DFlashError, load
from dflash_mlx.models.names import shipped_folder
from support.models import write_model
from support.responses import Response


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the real hub; what is downloaded is what a test puts in its place."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> str:
        raise AssertionError(f"asked the hub for {name}")

    monkeypatch.setattr("dflash_mlx.models.source.snapshot_download", refuse)


HUB_ERRORS = {
    "no access": (
        GatedRepoError("403 Client Error.\nsecond line", response=Response()),
        "'owner/name' is gated, and this machine has no access to it; accept its licence",
    ),
    "no such repository": (
        RepositoryNotFoundError("404 Client Error.\nsecond line", response=Response()),
        "'owner/name' is neither a folder nor a public model",
    ),
    "no network": (
        LocalEntryNotFoundError("Cannot find the snapshot online.\nsecond line"),
        "could not be downloaded (Cannot find the snapshot online.)",
    ),
    "a connection that breaks": (
        ConnectionError("Connection refused"),
        "could not be downloaded (Connection refused)",
    ),
}


@pytest.mark.parametrize("option", ["model", "drafter"])
@pytest.mark.parametrize("case", HUB_ERRORS)
def test_a_name_that_cannot_be_had_is_one_sentence_with_the_option(case, option, monkeypatch):
    error, message = HUB_ERRORS[case]

    def refuse(name: str, **_: Any) -> str:
        raise error

    monkeypatch.setattr("dflash_mlx.models.source.snapshot_download", refuse)
    with pytest.raises(DFlashError) as failure:
        load(**{"model": "somewhere/else", option: "owner/name"})
    assert message in str(failure.value)
    assert f"--{option}" in failure.value.next_step
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "name",
    ["./nowhere/at/all", "/nowhere/at/all", "~nobody-of-this-name/model", "x" * 300 + "/name"],
    ids=["relative", "absolute", "unknown home", "too long for a file"],
)
def test_a_path_that_is_not_there_is_reported_without_the_network(name):
    with pytest.raises(DFlashError, match="there is no folder .*--model"):
        load(model=name)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("option", ["model", "drafter"])
def test_a_file_in_place_of_a_folder_is_reported(tmp_path, option):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(DFlashError, match=f"is a file, not a model folder.*--{option}"):
        load(**{"model": str(tmp_path), option: str(file)})


@pytest.mark.parametrize("name", ["", "..", "x" * 300, "x\0y", "x/y"])
def test_names_that_are_of_nothing_shipped(name):
    assert shipped_folder(name) is None


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("name", ["", "x" * 300, "x\0y"])
def test_a_drafter_by_a_name_that_nothing_can_have_is_refused(tmp_path, name):
    model = str(write_model(tmp_path / "model"))
    with pytest.raises(DFlashError, match="there is no folder .*--drafter"):
        load(model=model, drafter=name)
