"""Kernels against their references at many random shapes, on Metal or in the emulator.

    .venv/bin/python scripts/kernels_sweep.py --each 100 --seed 1

Prints the worst trial of every operation; ends with 1 where one is beyond what rounding explains.
Without Metal everything runs in the emulator: some minutes for a hundred of each.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

import mlx.core as mx

from kernels_metal.emulator import emulated
from kernels_metal.sweep import error, trials


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels against references at random shapes.")
    parser.add_argument("--each", type=int, default=100, help="trials of each operation")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other shapes")
    arguments = parser.parse_args()
    metal = mx.metal.is_available()
    print(f"on {'Metal' if metal else 'the emulator'}; an error of 1 is what rounding explains")
    worst: dict[str, tuple[float, str]] = {}
    with nullcontext() if metal else emulated():
        for trial in trials(arguments.seed, arguments.each):
            found = (error(trial), trial.label)
            name = trial.operation.name
            worst[name] = max(worst.get(name, found), found)
            if found[0] > 1:
                print(f"FAILED  {found[0]:.3g}  {trial.label}")
    for value, label in worst.values():
        print(f"{value:8.3f}  {label}")
    return int(any(value > 1 for value, _ in worst.values()))


if __name__ == "__main__":
    sys.exit(main())
