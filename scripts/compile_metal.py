"""Compile every variant of every kernel with Apple's compiler: no GPU is needed, Xcode is.

    .venv/bin/python -m kernels_metal.emulator --text build/metal
    .venv/bin/python scripts/compile_metal.py build/metal

Before each text stands MLX's own header, as MLX puts it there. A version of the language that this
compiler does not know is named and left out, but one must be known. Ends with 1 for any error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx

from kernels_metal.faults import first_error

VERSIONS = ("metal3.1", "metal3.2", "metal4.0")  # of macOS 14, 15 and 26
INCLUDE = Path(mx.__file__).parent / "include"
PREAMBLE = "mlx/backend/metal/kernels/utils.h"
_SHOWN = 20  # errors


def compiled(file: Path, version: str) -> str:
    """What the compiler says against a text, "" if nothing.

    Mathematics are those that MLX asks for: infinities and NaN count.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = ["xcrun", "-sdk", "macosx", "metal", f"-std={version}", "-fno-fast-math", "-O2"]
        command += ["-I", str(INCLUDE), "-include", PREAMBLE]
        command += ["-c", str(file), "-o", str(Path(folder) / "out.air")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip() or "failed without a word") if done.returncode else ""


def known(version: str) -> str:
    """Why not even an empty text compiles in this version, "" if it does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "empty.metal"
        file.write_text("[[kernel]] void nothing() {}\n", encoding="ascii")
        return compiled(file, version)


def failures(files: Sequence[Path], version: str) -> list[str]:
    """The first error of each text that does not compile."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = pool.map(lambda file: compiled(file, version), files)
        found = zip(files, said, strict=True)
        return [f"{file.name}: {first_error(words)}" for file, words in found if words]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with what --text of the emulator wrote")
    files = sorted(parser.parse_args(argv).folder.glob("*.metal"))
    versions = [version for version in VERSIONS if not _told(version)]
    wrong = 0
    for version in versions:
        found = failures(files, version)
        print(f"{version}: {len(files) - len(found)} of {len(files)} compile", flush=True)
        print("".join(f"  {line}\n" for line in found[:_SHOWN]), end="")
        wrong += len(found)
    if not files or not versions:
        print("nothing was compiled", file=sys.stderr)
    return int(bool(wrong) or not files or not versions)


def _told(version: str) -> str:
    why = known(version)
    if why:
        print(f"{version}: left out, the compiler says: {why.splitlines()[0]}", flush=True)
    return why


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
