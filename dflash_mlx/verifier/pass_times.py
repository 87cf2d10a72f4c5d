"""What a target pass costs on this machine, by its rows and its context; measured once, stored.

A wider pass accepts more and takes longer. `reliability.py` says which nodes of a draft are worth
their time, `drafters/adaptive.py` which draft is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
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
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
DEEP_ROWS = (1, 4, 8, 16, 48)  # behind longer contexts, where passes take longer
CONTEXTS = (128, 1024, 4096)  # committed tokens before the measured passes
_REPEATS = 3


@dataclass(frozen=True)
class PassTimes:
    """seconds[i]: of a target pass over rows[i] tokens behind `context` committed ones.

    deeper: the same behind longer contexts, in order. trees: of trees, where the others are of
    chains and trees take longer.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context: int = CONTEXTS[0]
    deeper: tuple[PassTimes, ...] = ()
    trees: PassTimes | None = None

    def of(self, rows: npt.NDArray[Any] | int, contexts: Sequence[float] = ()) -> npt.NDArray[Any]:
        """T(rows, contexts): interpolated, and never less for more rows or a longer context.

        contexts: committed tokens of the sequences in the pass; behind the longest that was
        measured every token more costs what it did before.
        """
        near = self._behind(rows)
        if not self.deeper or not contexts:
            return near
        length, below = sum(contexts) / len(contexts), self
        for above in self.deeper:
            far = np.maximum(above._behind(rows), near)
            if length < above.context or above is self.deeper[-1]:
                break
            below, near = above, far
        share = max(0.0, (length - below.context) / (above.context - below.context))
        return np.asarray(near + share * (far - near))

    def branching(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Seconds that a tree of so many nodes takes longer than a chain, behind any context."""
        if self.trees is None:
            return np.zeros(len(rows))
        return np.asarray(np.maximum(self.trees._behind(rows) - self._behind(rows), 0.0))

    def _behind(self, rows: npt.NDArray[Any] | int) -> npt.NDArray[Any]:
        """Behind just this context; more rows than were timed are on the last two times' line."""
        rising = np.maximum.accumulate(self.seconds)
        beyond = np.maximum(np.subtract(rows, self.rows[-1]), 0)
        slope = 0.0
        if len(rising) > 1:
            slope = (rising[-1] - rising[-2]) / (self.rows[-1] - self.rows[-2])
        return np.asarray(np.interp(rows, self.rows, rising) + slope * beyond)


def measure(target: Target) -> PassTimes:
    """Time passes over 1 to 96 rows behind short and long contexts; the least of three each.

    Trees, or chains where the target verifies no others or is recurrent, which makes trees dearer;
    then some trees beside them. Some seconds in all; what the caches hold behind the first tokens
    is made up. Whatever else the machine does only adds time, so the least is nearest to the truth.
    """
    cache = target.new_cache()
    prompt = mx.zeros(CONTEXTS[0], mx.int32)
    mx.eval(target.forward(prompt, cache, Block(CONTEXTS[0]))[0], cache.arrays)
    cache.commit(range(CONTEXTS[0]))
    contexts = [c for c in CONTEXTS if c == CONTEXTS[0] or c + ROWS[-1] <= target.context_length]
    dearer, trees = target.is_recurrent and target.takes_trees, []
    passes = [(c, n) for c in contexts for n in (ROWS if c == CONTEXTS[0] else DEEP_ROWS)]
    seconds: dict[int, list[float]] = {context: [] for context in contexts}
    for context, rows in tqdm(passes, desc="timing this machine, once", leave=False):
        cache.lengthen(context - cache.length)
        block = _tree_of(rows) if target.takes_trees and not dearer else Block(rows)
        seconds[context].append(min(_time_passes(target, cache, block)))
        if dearer and context == CONTEXTS[0] and rows in DEEP_ROWS:  # right behind, to compare
            trees.append(min(_time_passes(target, cache, _tree_of(rows))))
    first, *deeper = (
        PassTimes(ROWS if context == CONTEXTS[0] else DEEP_ROWS, tuple(found), context)
        for context, found in seconds.items()
    )
    dear = PassTimes(DEEP_ROWS, tuple(trees)) if dearer else None
    return replace(first, deeper=tuple(deeper), trees=dear)


def _tree_of(rows: int) -> Block:
    return Block.of(Tree((0,) * (rows - 1), (-1, *((i - 1) // 2 for i in range(1, rows)))))


def _time_passes(target: Target, cache: SequenceCache, block: Block) -> Iterator[float]:
    """Seconds of several such passes, without the first one's."""
    ids = mx.zeros(block.rows, mx.int32)
    for repeat in range(_REPEATS + 1):
        start = time.perf_counter()
        mx.eval(mx.argmax(target.forward(ids, cache, block)[0], axis=-1))
        if repeat:
            yield time.perf_counter() - start
        cache.discard()


def stored_times(target: Target, again: bool = False, folder: Path | None = None) -> PassTimes:
    """As `measure`, from the cache folder where this machine, model and MLX were measured before.

    again: measure anyway. A file that cannot be read or written is done without.
    """
    file = (folder or _folder()) / f"{_key(target)}.json"
    try:
        if not again:
            return read_times(file)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    times = measure(target)
    keep_text(file, json.dumps({"model": target.name, **asdict(times)}))
    return times


def timing_day(target: Target) -> str:
    """The day on which `stored_times` measured, as in "2026-11-22"; "" where nothing is stored."""
    try:
        taken = (_folder() / f"{_key(target)}.json").stat().st_mtime
    except OSError:
        return ""
    return date.fromtimestamp(taken).isoformat()


def forget_times(target: Target) -> None:
    """Let them be measured again, by this program and the next one."""
    target.pass_times = None
    with suppress(OSError):
        (_folder() / f"{_key(target)}.json").unlink()


def read_times(file: Path) -> PassTimes:
    """What `stored_times` kept. OSError, ValueError, KeyError or TypeError for anything else."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    deeper, trees = tuple(map(_read, stored["deeper"])), stored["trees"]
    times = replace(_read(stored), deeper=deeper, trees=trees and _read(trees))
    if times.rows != ROWS or any(deep.rows != DEEP_ROWS for deep in times.deeper):
        raise ValueError("times of other rows")
    return times


def _read(stored: dict[str, Any]) -> PassTimes:
    rows, seconds = tuple(stored["rows"]), tuple(float(s) for s in stored["seconds"])
    if len(rows) != len(seconds) or min(seconds) <= 0:
        raise ValueError("not a time for every number of rows")
    return PassTimes(rows, seconds, int(stored["context"]))


def _folder() -> Path:
    return platformdirs.user_cache_path("dflash-chat") / "timing"


def _key(target: Target) -> str:
    kernels = target.kernels.mode if target.kernels.active else "off"
    return model_key(target.name, target.parameters(), kernels, target.kv_bits)
