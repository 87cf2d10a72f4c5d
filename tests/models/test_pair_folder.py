"""Pair folders: what is read back, and what is refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import pair_folder

NAMES = {"target": "owner/model", "drafter": "owner/drafter"}


def make(folder: Path, names: dict[str, str] = NAMES) -> Path:
    for part in names:
        (folder / part).mkdir(parents=True)
    pair_folder.write(folder, names, {"mlx": "1.0"})
    return folder


@pytest.mark.parametrize("more", [{}, {"second-drafter": "owner/second"}])
def test_a_pair_folder_says_where_its_models_are_and_come_from_and_may_be_moved(tmp_path, more):
    moved = make(tmp_path / "pair", {**NAMES, **more}).rename(tmp_path / "moved")
    assert pair_folder.read(moved) == {**NAMES, **more}


def test_only_a_folder_with_a_pair_json_is_a_pair_folder(tmp_path):
    assert pair_folder.is_pair_folder(make(tmp_path / "pair"))
    assert not pair_folder.is_pair_folder(tmp_path)
    assert not pair_folder.is_pair_folder(tmp_path / "nowhere")


def test_a_pair_folder_without_one_of_its_models_is_refused(tmp_path):
    folder = make(tmp_path / "pair")
    (folder / "drafter").rmdir()
    with pytest.raises(DFlashError, match="pair lacks the folder drafter; convert the pair again"):
        pair_folder.read(folder)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "no readable pair.json"),
        ("[]", "no readable pair.json"),
        ({"made_from": NAMES}, "version None"),
        ({"version": 2, "made_from": NAMES}, "version 2, supported is 1"),
        ({"version": 1, "made_from": {"target": "x"}}, "made_from"),
        ({"version": 1, "made_from": {**NAMES, "../elsewhere": "x"}}, "made_from"),
        ({"version": 1, "made_from": "x"}, "made_from"),
    ],
)
def test_a_damaged_pair_json_is_refused(tmp_path: Path, content: Any, complaint: str):
    folder = make(tmp_path / "pair")
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / pair_folder.FILE).write_text(text)
    with pytest.raises(DFlashError, match=complaint) as error:
        pair_folder.read(folder)
    assert str(folder / pair_folder.FILE) in error.value.what
