"""A destination is complete or absent: interruptions, full disks, kills, and what they leave."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.convert import conversion, plan, writing
from dflash_mlx.convert.__main__ import main
from dflash_mlx.convert.writing import staged
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.names import read_pair
from support.models import write_drafter, write_model

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """The arguments of a conversion to tmp_path/dst."""
    drafter = write_drafter(tmp_path / "drafter")
    return [str(write_model(tmp_path / "model")), str(tmp_path / "dst"), "--pair", str(drafter)]


def nothing_is_left(folder: Path) -> bool:
    return sorted(file.name for file in folder.iterdir()) == ["drafter", "model"]


def fail_at(patch: pytest.MonkeyPatch, stage: str, error: BaseException) -> None:
    """Let what is called at `stage` raise `error`, once it has been called often enough before."""
    module, name, before = STAGES[stage]
    original: Callable[..., Any] = getattr(module, name)
    calls = iter(range(10**6))

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == before:
            raise error
        return original(*arguments, **keywords)

    patch.setattr(module, name, replaced)


# What is called at each stage of a conversion, and how often it may have been before
STAGES: dict[str, tuple[Any, str, int]] = {
    "the folder is made": (writing.Path, "mkdir", 0),
    "the target": (conversion, "_mlx_lm_convert", 0),
    "the target's tokenizer is copied": (conversion.shutil, "copyfile", 0),
    "the drafter's weights": (conversion.mx, "save_safetensors", 1),
    "pair.json": (plan, "write_pair", 0),
    "the files are synced": (writing.os, "fsync", 5),
    "the folder takes its place": (writing.os, "rename", 0),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interruption_and_a_full_disk_leave_no_destination(pair, tmp_path, monkeypatch, stage):
    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (FULL, DFlashError)):
        with monkeypatch.context() as patch:
            fail_at(patch, stage, error)
            said = rf"dst .*\({FULL.strerror}\)" if error is FULL else None
            with pytest.raises(expected, match=said):
                main(pair)
        assert nothing_is_left(tmp_path)


def test_an_empty_folder_may_be_the_destination_and_what_was_killed_is_removed(pair, tmp_path):
    (tmp_path / "dst").mkdir()
    killed = tmp_path / ".dst.partial" / "target"
    killed.mkdir(parents=True)
    (killed / "left behind").touch()
    main(pair)
    assert read_pair(tmp_path / "dst") and not killed.exists()
    assert not (tmp_path / "dst" / "target" / "left behind").exists()


def test_a_conversion_to_where_another_one_writes_is_refused_and_leaves_that_alone(tmp_path):
    destination = tmp_path / "dst"
    others = [tmp_path / ".other.partial", tmp_path / "dst.partial"]
    for other in others:
        other.mkdir()
    with staged(destination) as first:
        (first / "winner").touch()
        with pytest.raises(DFlashError, match="dst is being written"), staged(destination):
            pass
    assert [file.name for file in destination.iterdir()] == ["winner"]
    assert sorted(tmp_path.iterdir()) == sorted([*others, destination])
    assert destination.stat().st_mode == others[0].stat().st_mode


# What is refused before anything is written


def test_a_folder_with_something_in_it_is_refused_and_kept(pair, tmp_path):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").write_text("data")
    for check in ([], ["--check"]):
        with pytest.raises(DFlashError, match="dst .* precious"):
            main([*pair, *check])
    assert (tmp_path / "dst" / "precious").read_text() == "data"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model/config.json", "config.json is a file"),
        ("nowhere/dst", "no folder .*nowhere"),
        ("x" * 300, "xxx.*cannot be DST"),
        ("a\0b", "cannot be DST"),
    ],
)
def test_what_cannot_be_a_destination_is_refused(pair, tmp_path, name, value):
    with pytest.raises(DFlashError, match=value) as failure:
        main([pair[0], str(tmp_path / name)])
    assert "DST" in str(failure.value)
    assert nothing_is_left(tmp_path)


def test_a_disk_that_is_too_small_is_refused_with_both_values(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=123_456))
    monkeypatch.setattr(plan, "convert", None)  # nothing is written
    with pytest.raises(DFlashError, match=r"dst needs 16\.\d MB, .* 123\.5 kB"):
        main(pair)
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("part", ["model", "drafter"])
def test_a_source_that_is_cut_off_meanwhile_is_named_and_nothing_is_left(
    pair, tmp_path, monkeypatch, part
):
    file = tmp_path / part / "model.safetensors"
    write = plan._write

    def cut_first(*arguments):
        os.truncate(file, 20_000)
        write(*arguments)

    monkeypatch.setattr(plan, "_write", cut_first)
    with pytest.raises(DFlashError, match=str(tmp_path / part)):
        main(pair)
    assert nothing_is_left(tmp_path)
