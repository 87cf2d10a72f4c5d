"""A destination is complete or absent: interruptions, full disks, kills, and what they leave."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.convert import run, staging, target, tensors
from dflash_mlx.convert.__main__ import main
from dflash_mlx.convert.staging import MARGIN, check_space, gigabytes, staged
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import pair_folder
from support.converted import config
from support.models import write_drafter, write_model


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """The arguments of a conversion to tmp_path/dst."""
    drafter = write_drafter(tmp_path / "drafter")
    return [str(write_model(tmp_path / "model")), str(tmp_path / "dst"), "--pair", str(drafter)]


def nothing_is_left(folder: Path) -> bool:
    return sorted(file.name for file in folder.iterdir()) == ["drafter", "model"]


def failing_at(call: int, original: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`original`, which raises `error` at its n-th call (from 0)."""
    calls = iter(range(10**6))

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*arguments, **keywords)

    return replaced


# What is called at each stage of a conversion, and how often it may have been before
STAGES: dict[str, tuple[Any, str, int]] = {
    "planning": (run, "make_plan", 0),
    "the folder is made": (staging.tempfile, "mkdtemp", 1),  # after the scratch folder
    "the target's tokenizer is copied": (target.shutil, "copyfile", 1),
    "the target's config": (target, "_write_config", 0),
    "the first tensor": (tensors, "_bytes", 0),
    "a later tensor": (tensors, "_bytes", 17),
    "the drafter's weights": (tensors, "write_file", 1),
    "pair.json": (pair_folder, "write", 0),
    "the files are synced": (staging.os, "fsync", 5),
    "the folder takes its place": (staging.os, "rename", 0),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interruption_leaves_no_destination(pair, tmp_path, monkeypatch, stage):
    module, name, call = STAGES[stage]
    broken = failing_at(call, getattr(module, name), KeyboardInterrupt())
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        with pytest.raises(KeyboardInterrupt):
            main(pair)
    assert nothing_is_left(tmp_path)
    main(pair)
    assert pair_folder.read(tmp_path / "dst")


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "planning"])
def test_a_disk_that_fills_up_is_one_sentence_and_leaves_no_destination(
    pair, tmp_path, monkeypatch, stage
):
    module, name, call = STAGES[stage]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(module, name, failing_at(call, getattr(module, name), full))
    with pytest.raises(DFlashError, match=r"dst cannot be written \(No space left on device\)"):
        main(pair)
    assert nothing_is_left(tmp_path)


def test_what_the_system_refuses_to_write_leaves_no_destination(pair, tmp_path):
    """No fault put in: the system itself ends a file at 100 kB."""
    limited = (
        "import resource, signal, sys\n"
        "from dflash_mlx.cli import options as cli\n"
        "from dflash_mlx.convert.__main__ import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "cli.run(main, 'convert')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, *pair], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "dst cannot be written (File too large)" in done.stderr.splitlines()[-1]
    assert nothing_is_left(tmp_path)


def test_a_killed_conversion_leaves_no_destination_and_the_next_one_cleans_up(pair, tmp_path):
    """Killed in the middle of the weights, without a chance to remove anything."""
    killed = (
        "import os, signal, sys\n"
        "from dflash_mlx.convert import tensors\n"
        "from dflash_mlx.convert.__main__ import main\n"
        "original, calls = tensors._bytes, iter(range(100))\n"
        "def kill_later(array):\n"
        "    if next(calls) == 10:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(array)\n"
        "tensors._bytes = kill_later\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", killed, *pair],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "dst").exists()
    (partial,) = tmp_path.glob(".dst.partial-*")
    assert any(partial.rglob("*.safetensors"))
    main(pair)
    assert not partial.exists()
    assert pair_folder.read(tmp_path / "dst")


def test_the_folder_of_a_conversion_that_still_runs_is_left_alone(tmp_path):
    destination = tmp_path / "dst"
    with (
        pytest.raises(DFlashError, match="dst cannot be written"),
        staged(destination, 0) as slower,
    ):
        with staged(destination, 0) as faster:
            (faster / "winner").touch()
            assert slower.is_dir()
        assert slower.is_dir()
        (slower / "loser").touch()
    assert [file.name for file in destination.iterdir()] == ["winner"]
    assert [file.name for file in tmp_path.iterdir()] == ["dst"]


def test_folders_of_other_destinations_are_left_alone(tmp_path):
    others = [tmp_path / ".other.partial-1", tmp_path / "dst.partial-2"]
    for other in others:
        other.mkdir()
    with staged(tmp_path / "dst", 0):
        pass
    assert all(other.is_dir() for other in others)


def test_the_destination_has_the_permissions_of_any_new_folder(tmp_path):
    (tmp_path / "new").mkdir()
    with staged(tmp_path / "dst", 0):
        pass
    assert (tmp_path / "dst").stat().st_mode == (tmp_path / "new").stat().st_mode


# What is refused before anything is written


def test_an_empty_folder_may_be_the_destination(pair, tmp_path):
    (tmp_path / "dst").mkdir()
    main(pair)
    assert config(tmp_path / "dst" / "target")["model_type"] == "llama"


def test_a_folder_with_something_in_it_is_refused_and_kept(pair, tmp_path):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").write_text("data")
    with pytest.raises(DFlashError, match="dst is not empty, it holds precious; name a folder"):
        main(pair)
    assert (tmp_path / "dst" / "precious").read_text() == "data"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model/config.json", "config.json is a file; name a folder that does not exist"),
        ("nowhere/dst", "there is no folder .*nowhere; create it, or change DST"),
        ("x" * 300, "cannot be DST"),
        ("a\0b", "cannot be DST"),
    ],
)
def test_what_cannot_be_a_destination_is_refused(pair, tmp_path, name, message):
    with pytest.raises(DFlashError, match=message):
        main([pair[0], str(tmp_path / name)])
    assert nothing_is_left(tmp_path)


def test_a_disk_that_is_too_small_is_refused_with_both_values(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=123_456))
    monkeypatch.setattr(tensors, "write_file", None)  # nothing is written
    with pytest.raises(
        DFlashError, match=r"dst needs 16\.\d\d MB, but only 123\.46 kB are free in .*; free some"
    ):
        main(pair)
    assert nothing_is_left(tmp_path)


def test_space_is_checked_to_the_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MARGIN + 100))
    check_space(tmp_path, 100, "it")
    with pytest.raises(DFlashError, match="it needs"):
        check_space(tmp_path, 101, "it")


def test_sizes_are_given_in_the_largest_unit_that_fits():
    assert [gigabytes(size) for size in (12, 1500, 2_345_000, 4 * 10**9)] == [
        "12 bytes",
        "1.50 kB",
        "2.35 MB",
        "4.00 GB",
    ]


@pytest.mark.parametrize("part", ["model", "drafter"])
def test_a_source_that_is_cut_off_meanwhile_is_named_and_nothing_is_left(
    pair, tmp_path, monkeypatch, part
):
    file = tmp_path / part / "model.safetensors"
    write_shards = run.write_shards

    def cut_first(*arguments):
        os.truncate(file, 20_000)
        write_shards(*arguments)

    monkeypatch.setattr(run, "write_shards", cut_first)
    with pytest.raises(DFlashError, match=rf"{tmp_path / part} can no longer be read .*; check"):
        main(pair)
    assert nothing_is_left(tmp_path)


def test_a_folder_that_may_not_be_written_to_is_refused(pair, tmp_path, monkeypatch):
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    mkdtemp = failing_at(1, staging.tempfile.mkdtemp, denied)
    monkeypatch.setattr(staging.tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(DFlashError, match=r"dst cannot be written \(Permission denied\)"):
        main(pair)
    assert nothing_is_left(tmp_path)
