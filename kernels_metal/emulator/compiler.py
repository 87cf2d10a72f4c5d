"""Compiles the runtime and kernels with clang, once for each text: results are kept on disk.

clang 18 or newer from PATH, else the one of the PyPI package `ziglang`; older ones lack the half
types. Kernels go through assembly, where a table of code addresses and source lines is added.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kernels_metal.emulator.errors import EmulatorError

HERE = Path(__file__).parent
RUNTIME = HERE / "runtime"
INCLUDE = HERE / "include"
OLDEST = 18
_NAMES = ("clang", *(f"clang-{n}" for n in range(25, OLDEST - 1, -1)))

_COMMON = "-x c++ -std=c++20 -fPIC -fno-exceptions -fno-rtti"
_RUNTIME_FLAGS = f"{_COMMON} -O2 -fvisibility=hidden -fno-sanitize=undefined -Wall -Wextra -Werror"
_KERNEL_FLAGS = f"""{_COMMON}
-O1 -gline-tables-only -nostdinc -fno-optimize-sibling-calls -fconvergent-functions
-fno-vectorize -fno-slp-vectorize -fno-strict-aliasing
-ffp-contract=off -Xclang -cl-single-precision-constant
-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none
-ftrivial-auto-var-init=pattern
-fno-sanitize=undefined -fsanitize=thread -fno-sanitize-recover=all
-fsanitize=array-bounds,alignment,integer-divide-by-zero,shift-exponent
-mllvm -sink-common-insts=false -mllvm -hoist-common-insts=false -mllvm -enable-tail-merge=false
-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1
-Werror=uninitialized -Werror=sometimes-uninitialized -Werror=return-type
-Werror=infinite-recursion -Werror=implicit-float-conversion -Wno-implicit-int-float-conversion
-Werror=frame-larger-than -Wframe-larger-than=131072
-Wno-unknown-attributes -Wno-duplicate-decl-specifier -Wno-user-defined-literals
-Wno-reserved-user-defined-literal -Wno-unused-value -Wno-pass-failed
"""

# The hooks are the runtime's, never the compiler's own.
_LINK_FLAGS = "-shared -fno-sanitize=undefined" + (
    " -Wl,-undefined,dynamic_lookup" if sys.platform == "darwin" else ""
)
_CALL = re.compile(r"\s(?:callq?|bl)\s+\*?_?(?:__tsan_|emulator_)")
_PLACE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')


@dataclass(frozen=True)
class Compiler:
    """How to call clang, and what tells one version from another."""

    command: tuple[str, ...]
    version: str

    def run(self, arguments: Sequence[str], folder: Path) -> str:
        """Call it; "" if all went well, else what it printed."""
        done = subprocess.run(
            [*self.command, *arguments], cwd=folder, capture_output=True, text=True, check=False
        )
        lines = [x for x in done.stderr.splitlines() if not x.startswith("zig: warning")]
        return ("\n".join(lines) or "clang failed") if done.returncode else ""


def find_compiler() -> Compiler:
    """Raises EmulatorError if there is none."""
    path = os.environ.get("PATH", os.defpath)
    return _find_compiler(path)


@functools.cache
def _find_compiler(path: str) -> Compiler:
    for name in _NAMES:
        found = shutil.which(name, path=path)
        version = _version(found) if found else ""
        if found and _is_new_enough(version):
            return Compiler((found,), version)
    if (package := importlib.util.find_spec("ziglang")) and package.origin:
        zig = str(Path(package.origin).with_name("zig"))  # `-m ziglang` starts it from Python
        return Compiler((zig, "cc", "-mcpu=baseline"), _version(zig, "cc"))
    raise EmulatorError(
        "compile",
        f"no clang {OLDEST} or newer on PATH and no ziglang package; "
        "install one (pip install ziglang)",
        "",
    )


def _version(*command: str) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def _is_new_enough(version: str) -> bool:
    """Apple counts its own way."""
    found = re.search(r"clang version (\d+)", version)
    return bool(found) and "Apple" not in version and int(found[1]) >= OLDEST if found else False


def cache_folder() -> Path:
    """Where compiled code is kept."""
    return platformdirs.user_cache_path("dflash-chat") / "emulator"


@functools.cache
def _own_text() -> str:
    """The runtime and the headers."""
    files = sorted([*RUNTIME.iterdir(), *INCLUDE.iterdir()])
    return "".join(f"{f.name}\n{f.read_text(encoding='utf-8')}" for f in files)


def _key(compiler: Compiler, *texts: str) -> str:
    flags = (_RUNTIME_FLAGS, _KERNEL_FLAGS, _LINK_FLAGS, *compiler.command[1:])
    parts = [*texts, _own_text(), compiler.version, platform.machine(), *flags]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def compile_runtime() -> Path:
    """The shared library that all kernels use."""
    compiler = find_compiler()
    target = cache_folder() / f"runtime-{_key(compiler)}.so"
    if not target.exists():
        with _working_folder() as folder:
            made = Path(folder) / "runtime.so"
            source = str(RUNTIME / "runtime.cpp")
            problem = compiler.run(
                [*_RUNTIME_FLAGS.split(), "-shared", source, "-o", str(made)], Path(folder)
            )
            if problem:
                raise EmulatorError("compile", problem, "")
            os.replace(made, target)
    return target


def compile_kernel(name: str, source: str) -> Path:
    """The shared library of one kernel. Raises EmulatorError with clang's words."""
    compiler = find_compiler()
    target = cache_folder() / f"{name}-{_key(compiler, source)}.so"
    if not target.exists():
        with _working_folder() as folder:
            os.replace(_build(compiler, name, source, Path(folder)), target)
    return target


def _working_folder() -> tempfile.TemporaryDirectory[str]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=cache_folder(), prefix="building-")


def _build(compiler: Compiler, name: str, source: str, folder: Path) -> Path:
    (folder / "kernel.cpp").write_text(source, encoding="utf-8")
    flags = [*_KERNEL_FLAGS.split(), "-I", str(INCLUDE)]
    problem = compiler.run([*flags, "-S", "kernel.cpp", "-o", "kernel.s"], folder)
    if problem:
        raise _compile_error(name, problem)
    assembly = folder / "kernel.s"
    assembly.write_text(add_lines(assembly.read_text(encoding="utf-8")), encoding="utf-8")
    problem = compiler.run([*_LINK_FLAGS.split(), "kernel.s", "-o", "kernel.so", "-lm"], folder)
    if problem:
        raise EmulatorError("compile", problem, name)
    return folder / "kernel.so"


def _compile_error(name: str, problem: str) -> EmulatorError:
    found = re.search(r"^([^\s:]+):(\d+):\d+: (?:fatal )?error: (.*)$", problem, re.MULTILINE)
    if not found:
        return EmulatorError("compile", problem, name)
    kind = "compile"
    if re.search(r"address space|'[^']*__(global|local|constant) ", problem):
        kind = "address space"
    if "uninitialized" in found[3]:
        kind = "uninitialised"
    return EmulatorError(kind, f"{found[3]}\n{problem}", name, (found[1], int(found[2])))


def add_lines(assembly: str) -> str:
    """Assembly with the table `emulator_lines`: return address, file and line of every hook call.

    The table is in the order of addresses and ends with zeros.
    """
    prefix, local = ("_", "L") if sys.platform == "darwin" else ("", ".L")
    lines: list[str] = []
    table: list[tuple[str, str, str]] = []
    files: dict[str, str] = {}
    place = ("0", "0")
    for line in assembly.splitlines():
        lines.append(line)
        if found := _FILE.match(line):
            files[found[1]] = found[2]
        elif found := _PLACE.match(line):
            place = (found[1], found[2] if found[2] != "0" else place[1])
        elif _CALL.search(line):
            label = f"{local}emulator_{len(table)}"
            lines.append(f"{label}:")
            table.append((label, *place))
    lines += ["\t.data", "\t.p2align 3", f"\t.globl {prefix}emulator_lines"]
    lines.append(f"{prefix}emulator_lines:")
    for label, file, number in table:
        lines += [f"\t.quad {label}", f"\t.quad {local}emulator_file_{file}", f"\t.quad {number}"]
    lines += ["\t.quad 0"] * 3
    for file in {"0", *files, *(file for _, file, _ in table)}:
        lines += [f"{local}emulator_file_{file}:", f'\t.asciz "{files.get(file, "")}"']
    return "\n".join([*lines, ""])
