"""Runs a kernel of the catalog on random inputs in the emulator and prints what it did.

Counts only, no times: bytes of every buffer, SIMD-group operations, barriers, threadgroup memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from kernels_metal.catalog import CATALOG
from kernels_metal.emulator import Counters, EmulatorError, emulated
from kernels_metal.emulator.texts import write_texts

HEADINGS = ("buffer", "size", "read", "times", "fetched", "times", "written")


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0, 1 if the emulator found a fault, 2 for bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.text:
        return _write_texts(options.text)
    if options.name is None:
        parser.error("name a kernel, or a folder with --text")
    entry = CATALOG[options.name]
    try:
        shape = {**entry.defaults, **_parse_shape(options.shape, entry.defaults)}
        with emulated() as run:
            result = entry.run(**shape)
            mx.eval(result)
    except ValueError as problem:
        print(f"{options.name}: {problem}", file=sys.stderr)
        return 2
    except EmulatorError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(f"{options.name} " + " ".join(f"{name}={value}" for name, value in shape.items()))
    for counters in run.counters:
        print(describe(counters))
    return 0


def _write_texts(folder: Path) -> int:
    try:
        files = write_texts(folder)
    except OSError as problem:
        print(f"{folder} cannot be written ({problem.strerror})", file=sys.stderr)
        return 2
    except EmulatorError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(f"{len(files)} texts in {folder}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels_metal.emulator", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("name", nargs="?", choices=CATALOG, metavar="NAME", help=", ".join(CATALOG))
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="write the text of every variant there instead"
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=[],
        metavar="SIZE=N",
        help="; ".join(
            f"{name}: {' '.join(f'{k}={v}' for k, v in entry.defaults.items())}"
            for name, entry in CATALOG.items()
        ),
    )
    return parser


def _parse_shape(texts: Sequence[str], known: Mapping[str, int]) -> dict[str, int]:
    """Raises ValueError for unknown sizes and for what is no number."""
    sizes = {}
    for text in (part for given in texts for part in given.split(",") if part):
        name, _, value = text.partition("=")
        if name not in known or not value.isdecimal():
            raise ValueError(
                f"--shape {text}: known sizes are {', '.join(f'{k}=N' for k in known)}"
            )
        sizes[name] = int(value)
    return sizes


def describe(counters: Counters) -> str:
    """A table of one launch."""
    c = counters
    lines = [
        f"\n{c.kernel}: {c.threadgroups} threadgroups, {c.threads} threads, "
        f"{c.threadgroup_bytes} bytes of threadgroup memory",
        f"{c.simd_operations} SIMD-group operations, {c.matrix_products} of them matrix products, "
        f"{c.barriers} threadgroup barriers, {c.simdgroup_barriers} SIMD-group barriers",
        f"{c.device_accesses} loads and stores in device memory, "
        f"{c.threadgroup_accesses} in threadgroup memory, of {c.threadgroup_cycles} cycles",
        _row(HEADINGS),
    ]
    for name, traffic in c.buffers.items():
        size, read, fetched = traffic.size, traffic.read, traffic.fetched
        cells = (size, read, _times(read, size), fetched, _times(fetched, size), traffic.written)
        lines.append(_row((name, *map(str, cells))))
    return "\n".join(lines)


def _times(part: int, size: int) -> str:
    return f"{part / size:.2f}" if size else "-"


def _row(cells: Sequence[str]) -> str:
    name, *numbers = cells
    return f"  {name:<20}" + "".join(f"{n:>14}" for n in numbers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
