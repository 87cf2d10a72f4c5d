"""`python -m kernels_metal.sweep`: every operation at random shapes, against its reference.

for trial in trials(seed=0, each=40):
    print(trial.label, error(trial))  # above 1: further than rounding explains
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from kernels_metal.catalog import OPERATIONS
from kernels_metal.checks import FLOATS
from kernels_metal.faults import first_error
from kernels_metal.gpu import gpu_family
from kernels_metal.operation import Draw, Operation, dtype_name

FLOAT32 = 1e-5  # error of a sum, as a share of the largest number in the result
ROUNDOFF = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of one rounded result
LETTERS = {"vocabulary": "V", "depth": "K", "columns": "N"}  # as the docstrings call them
TRIALS, EMULATED_TRIALS = 12, 3  # of each operation; a multiple of the three dtypes
NO_EMULATOR = "the emulator is in a checkout of the project alone"


@dataclass(frozen=True)
class Trial:
    """One call of an operation on random arguments."""

    operation: Operation
    arguments: tuple[Any, ...]
    label: str


def trials(seed: int, each: int) -> Iterator[Trial]:
    """`each` calls of every operation, dtypes in turn; the same for the same seed."""
    rng = random.Random(seed)
    for operation in OPERATIONS:
        for i in range(each):
            draw = Draw(rng, FLOATS[i % len(FLOATS)])
            arguments = operation.arguments(draw)
            names = [name for name in operation.defaults if name in draw.sizes]
            names += [name for name in draw.sizes if name not in names]
            sizes = " ".join(f"{LETTERS.get(name, name)} {draw.sizes[name]}" for name in names)
            yield Trial(operation, arguments, f"{operation.name} {dtype_name(draw.dtype)}: {sizes}")


def error(trial: Trial) -> float:
    """The largest difference between kernel and float32 reference, 1 being what rounding explains.

    The reference runs on the CPU: newer GPUs round the factors of float32 products to TF32.
    Infinite for results that are not numbers, and for integers that differ.
    """
    operation = trial.operation
    ours = operation.compared(operation.kernel(*trial.arguments), *trial.arguments)
    with mx.stream(mx.cpu):
        arguments = [_widened(a) for a in trial.arguments]
        wide = operation.compared(operation.reference(*arguments), *arguments)
    return max(share(a, b) for a, b in zip(ours, wide, strict=True))


def share(ours: mx.array, reference: mx.array) -> float:
    """The difference as a share of what rounding explains; see `error`."""
    if not mx.issubdtype(ours.dtype, mx.floating):
        return 0.0 if mx.array_equal(ours, reference).item() else float("inf")
    size = mx.abs(reference)
    bound = FLOAT32 * size.max() + ROUNDOFF.get(ours.dtype, 0.0) * size
    apart = mx.abs(ours.astype(mx.float32) - reference) / (bound + 2.0**-25)
    worst = float(apart.max().item())  # type: ignore[arg-type]
    return worst if worst == worst else float("inf")


def _widened(argument: Any) -> Any:
    """In float32; what is packed stays as it is."""
    if isinstance(argument, list):
        return [_widened(item) for item in argument]
    if isinstance(argument, tuple):
        packed = any(isinstance(item, mx.array) and item.dtype == mx.uint32 for item in argument)
        items = argument if packed else [*map(_widened, argument)]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, mx.array) and mx.issubdtype(argument.dtype, mx.floating):
        return argument.astype(mx.float32)
    return argument


@dataclass(frozen=True)
class Result:
    """One trial of a kernel against its reference."""

    trial: Trial
    error: float  # as of `error`, infinite with a fault
    fault: str = ""  # that stopped it
    refused: str = ""  # why its kernel is not for such arguments here: it was not run

    @property
    def right(self) -> bool:
        """Whether it agreed, or was refused."""
        return bool(self.refused) or self.error <= 1


def main(argv: Sequence[str]) -> int:
    """Run the trials and print what came of them; returns the exit code, 1 for a wrong kernel."""
    arguments = parser().parse_args(argv)
    metal = mx.metal.is_available()
    each = arguments.trials or (TRIALS if metal else EMULATED_TRIALS)
    if not metal and (why := no_emulator()):
        print(f"not tried: this machine has no Metal, and {why}")
        return 0
    print("\n".join(introduction(metal, each)), flush=True)
    results = list(check_kernels(metal, arguments.seed, each))
    print("\n".join(verdict(results, "on Metal" if metal else "in the emulator")))
    return int(not all(result.right for result in results))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="kernels_metal.sweep", description="Run every Metal kernel against its reference."
    )
    result.add_argument(
        "--trials",
        type=_count,
        help=f"random shapes of each operation (default: {TRIALS}, emulated {EMULATED_TRIALS})",
    )
    result.add_argument("--seed", type=int, default=0, help="of the random shapes (default: 0)")
    return result


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def no_emulator() -> str:
    """Why kernels cannot be emulated here, "" where they can."""
    if find_spec("kernels_metal.emulator") is None:
        return NO_EMULATOR
    try:
        _compiler()
    except RuntimeError as problem:
        return f"the emulator has no compiler ({problem})"
    return ""


def _compiler() -> str:
    from kernels_metal.emulator import compiler  # in a checkout alone, not in the wheel

    return compiler.find_compiler().version.splitlines()[0]


def introduction(metal: bool, each: int) -> list[str]:
    """Where the kernels are about to run."""
    trials = f"{each} random shapes of each operation; an error of 1 is what rounding explains"
    if metal:
        return [f"on Metal ({gpu_family()}), {trials}"]
    return [
        "no Metal on this machine: decoding uses the references, and no kernel ran on a GPU.",
        f"Emulated instead: the kernels' Metal source, compiled with {_compiler()},",
        "on this processor, with checks of bounds, races, divergence and uninitialised memory;",
        f"{trials}. Speed is not emulated.",
    ]


def check_kernels(metal: bool, seed: int, each: int) -> Iterator[Result]:
    """Run `each` trials of every operation, on Metal or in the emulator."""
    with nullcontext() if metal else import_module("kernels_metal.emulator").emulated():
        for trial in tqdm(list(trials(seed, each)), desc="kernels", leave=False, disable=None):
            try:
                trial.operation.check(*trial.arguments)
            except ValueError as refusal:
                yield Result(trial, 0.0, refused=str(refusal))
                continue
            try:
                yield Result(trial, error(trial))
            except (RuntimeError, ValueError) as fault:  # the emulator, Metal or the GPU refuses it
                print(f"{trial.label}\n{fault}", file=sys.stderr)
                yield Result(trial, float("inf"), first_error(str(fault)))


def verdict(results: Sequence[Result], where: str) -> list[str]:
    """The worst trial of each operation, every wrong trial, and a sentence."""
    names = dict.fromkeys(result.trial.operation.name for result in results)
    lines = ["worst error of each operation, and where"]
    for name in names:
        worst = max((r for r in results if r.trial.operation.name == name), key=lambda r: r.error)
        lines.append(f"{worst.error:8.3f}  {worst.trial.label}")
    wrong = [result for result in results if not result.right]
    lines += [f"refused  {r.trial.label}  {r.refused}" for r in results if r.refused]
    lines += [f"WRONG {r.error:.3g}  {r.trial.label}  {r.fault}".rstrip() for r in wrong]
    return [*lines, f"{len(wrong)} of {len(results)} trials wrong {where}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
