"""Tries of operations' kernels in a process of its own: `python -m kernels_metal.trial`.

A kernel that hangs the GPU, or ends the process, does it here and not in a conversation. Says what
is wrong, "" where all that fits this GPU agrees with the reference; see `children`.
"""

from __future__ import annotations

import json
from dataclasses import replace

from kernels_metal.children import answer
from kernels_metal.sweep import Trial, error
from kernels_metal.variants import arguments, operation_of
from kernels_metal.watchdog import SECONDS


def tried(name: str, dtype: str, sizes: list[dict[str, int]]) -> str:
    """What is wrong with the kernels of an operation in random calls of these sizes."""
    operation, unfit, ran = operation_of(name), "", False
    for given in sizes:
        args = arguments(operation, dtype, given)
        for way in operation.ways(*args):
            one = replace(operation, kernel=operation.by(way))
            try:
                apart = error(Trial(one, args, ""))
            except ValueError as problem:  # more threads than this GPU has registers for
                unfit = str(problem)
                continue
            ran = True
            if apart > 1:
                return f"{apart:.1f} times as wrong as rounding explains at {json.dumps(given)}"
    return "" if ran else f"none of its variants fits this GPU: {unfit}"


if __name__ == "__main__":
    answer(
        lambda given: tried(given["operation"], given["dtype"], given["sizes"]), lambda _: SECONDS
    )
