"""What a target pass costs on this machine, by its number of rows; measured once and stored.

A wider pass accepts more and takes longer. `reliability.py` says which nodes of a draft are worth
their time, `drafters/adaptive.py` which draft is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import platformdirs
from tqdm import tqdm

from dflash_mlx.core.tree import Tree
from dflash_mlx.system.files import keep_text
from dflash_mlx.system.machine import model_key
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_CONTEXT = 128  # tokens before the measured passes
_REPEATS = 3


@dataclass(frozen=True)
class PassTimes:
    """seconds[i]: of a target pass over rows[i] tokens."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, rows: npt.NDArray[Any] | int, contexts: Sequence[int] = ()) -> npt.NDArray[Any]:
        """T(rows, contexts): interpolated, and never less for more rows.

        contexts: committed tokens of the sequences in the pass. All was measured behind 128, so
        they make no difference yet.
        """
        rising = np.maximum.accumulate(self.seconds)
        return np.asarray(np.interp(rows, self.rows, rising))


def measure(target: Target) -> PassTimes:
    """Time trees of 1 to 96 rows behind 128 tokens; the least of three each, a few seconds.

    Whatever else the machine does only adds time, so the least is nearest to the truth.
    """
    cache = target.new_cache()
    target.check_trees()
    prompt = mx.zeros(_CONTEXT, mx.int32)
    mx.eval(target.forward(prompt, cache, Block(_CONTEXT))[0], cache.arrays)
    cache.commit(range(_CONTEXT))
    seconds = []
    for rows in tqdm(ROWS, desc="timing this machine, once", leave=False):
        tree = Tree((0,) * (rows - 1), (-1, *((i - 1) // 2 for i in range(1, rows))))
        ids = mx.zeros(rows, mx.int32)
        times = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            mx.eval(mx.argmax(target.forward(ids, cache, Block.of(tree))[0], axis=-1))
            times.append(time.perf_counter() - start)
            cache.discard()
        seconds.append(min(times[1:]))
    return PassTimes(ROWS, tuple(seconds))


def stored_times(target: Target, again: bool = False, folder: Path | None = None) -> PassTimes:
    """As `measure`, from the cache folder where this machine, model and MLX were measured before.

    again: measure anyway. A file that cannot be read or written is done without.
    """
    folder = folder or platformdirs.user_cache_path("dflash-chat") / "timing"
    file = folder / f"{_key(target)}.json"
    try:
        if not again:
            return read_times(file)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    times = measure(target)
    keep_text(file, json.dumps(vars(times)))
    return times


def read_times(file: Path) -> PassTimes:
    """What `stored_times` kept. OSError, ValueError, KeyError or TypeError for anything else."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    times = PassTimes(tuple(stored["rows"]), tuple(float(s) for s in stored["seconds"]))
    if times.rows != ROWS or len(times.seconds) != len(ROWS) or min(times.seconds) <= 0:
        raise ValueError("times of other rows")
    return times


def _key(target: Target) -> str:
    kernels = target.kernels.mode if target.kernels.active else "off"
    return model_key(target.name, target.parameters(), kernels, target.kv_bits)
