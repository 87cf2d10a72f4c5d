"""One try of an operation's kernels in a process of its own: `python -m kernels_metal.trial JSON`.

A kernel that hangs the GPU, or ends the process, does it here and not in a conversation. Prints
what is wrong as JSON behind a mark, "" where all that fits this GPU agrees with the reference.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx

from kernels_metal.catalog import OPERATIONS
from kernels_metal.operation import Draw
from kernels_metal.sweep import Trial, error
from kernels_metal.watchdog import OUTCOME, SECONDS


def tried(name: str, dtype: str, sizes: list[dict[str, int]]) -> str:
    """What is wrong with the kernels of an operation in random calls of these sizes."""
    (operation,) = (each for each in OPERATIONS if each.name == name)
    unfit, ran = "", False
    for given in sizes:
        draw = Draw(random.Random(0), getattr(mx, dtype), {**operation.defaults, **given})
        args = operation.arguments(draw)
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


def main(given: dict[str, Any]) -> None:
    """Print the outcome. A try whose starter is gone and cannot end it ends by itself."""
    signal.alarm(int(SECONDS))
    print(OUTCOME + json.dumps(tried(given["operation"], given["dtype"], given["sizes"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
