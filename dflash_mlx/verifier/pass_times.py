"""What a target pass costs on this machine, by its rows and its context; measured once, stored.

A wider pass accepts more and takes longer. `reliability.py` says which nodes of a draft are worth
their time, `drafters/budget.py` which draft is. Nothing here is measured unless it is asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import platformdirs

from dflash_mlx.core.tree import Tree
from dflash_mlx.system.files import keep_text, kept_json
from dflash_mlx.system.machine import free_memory, model_key
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)  # the sizes that passes come in
DEEP_ROWS = (1, 4, 8, 16, 48)  # behind longer contexts, where passes take longer
CONTEXTS = (128, 1024, 4096, 16384)  # committed tokens before the measured passes
_COPIES = 3  # times its size that half of the free memory has to hold, as a cache grows by copies
_REPEATS = 3
_TRIED = 5.0  # seconds that kernels may be tried before passes are timed without them
_DRIFT, _NOTICED = 0.3, 32  # how far off times may be, as the median of so many real passes


def size_of(rows: npt.NDArray[Any] | int) -> npt.NDArray[Any]:
    """The next of those sizes, or just so many rows beyond the last."""
    place = np.minimum(np.searchsorted(ROWS, rows), len(ROWS) - 1)
    sizes: npt.NDArray[Any] = np.maximum(np.asarray(ROWS)[place], rows)
    return sizes


@dataclass(frozen=True)
class PassTimes:
    """Seconds of target passes by their rows."""

    rows: tuple[int, ...]  # in order
    seconds: tuple[float, ...]  # of a pass over so many
    context: int = CONTEXTS[0]  # committed tokens before them
    deeper: tuple[PassTimes, ...] = ()  # behind longer contexts, in order
    trees: PassTimes | None = None  # of trees, where they take longer than chains

    def of(self, rows: npt.NDArray[Any] | int, contexts: Sequence[float] = ()) -> npt.NDArray[Any]:
        """T(rows, contexts): interpolated, and never less for more rows or a longer context.

        contexts: committed tokens of the sequences in the pass; behind the longest that was
        measured every token more costs what it did before.
        """
        if not self.deeper or not contexts:
            return self._behind(rows)
        asked = np.union1d(self.rows, rows)
        near = self._behind(asked)
        length, below = sum(contexts) / len(contexts), self
        for above in self.deeper:
            far = np.maximum(above._behind(asked), near)
            if length < above.context or above is self.deeper[-1]:
                break
            below, near = above, far
        share = max(0.0, (length - below.context) / (above.context - below.context))
        rising = np.minimum.accumulate((near + share * (far - near))[::-1])[::-1]
        return np.asarray(rising[np.searchsorted(asked, rows)])

    def branching(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Seconds that a tree of so many nodes takes longer than a chain, behind any context."""
        if self.trees is None:
            return np.zeros(len(rows))
        return np.asarray(np.maximum(self.trees._behind(rows) - self._behind(rows), 0.0))

    def _behind(self, rows: npt.NDArray[Any] | int) -> npt.NDArray[Any]:
        """Behind just this context; more rows than were timed are on the last two times' line.

        What seemed slower than more rows had to wait for something else.
        """
        rising = np.minimum.accumulate(self.seconds[::-1])[::-1]
        beyond = np.maximum(np.subtract(rows, self.rows[-1]), 0)
        slope = 0.0
        if len(rising) > 1:
            slope = (rising[-1] - rising[-2]) / (self.rows[-1] - self.rows[-2])
        return np.asarray(np.interp(rows, self.rows, rising) + slope * beyond)


def measuring(target: Target) -> Generator[int, None, PassTimes]:
    """Time passes over 1 to 96 rows behind short and long contexts; the least of three each.

    After each pass it yields how many there are, so that others can have the machine in between.
    Trees, or chains where the target verifies no others or is recurrent, which makes trees dearer;
    then some trees beside them. What the caches hold behind the first tokens is made up. Rows are
    different words, as in a text: in a mixture of experts equal ones would share all their experts.
    Whatever else the machine does only adds time, so the least is nearest to the truth.
    """
    target.kernels.wait(_TRIED)
    likely = target.forward(mx.zeros(1, mx.int32), target.new_cache(), Block(1))[0][-1]
    words = mx.argsort(-likely)[mx.arange(CONTEXTS[0]) % likely.size]
    cache = target.new_cache()
    mx.eval(target.forward(words, cache, Block(CONTEXTS[0]))[0], cache.arrays)
    cache.commit(range(CONTEXTS[0]))
    held = [c for c in CONTEXTS[1:] if c + ROWS[-1] <= target.context_length]
    contexts = [CONTEXTS[0], *(c for c in held if _fits(cache, c))]
    dearer = target.is_recurrent and target.takes_trees
    trees, found = target.takes_trees and not dearer, list[PassTimes]()
    tables = [(c, ROWS if c == CONTEXTS[0] else DEEP_ROWS, trees) for c in contexts]
    if dearer:  # behind the shortest context alone
        tables.insert(0, (CONTEXTS[0], DEEP_ROWS, True))
    passes = (_REPEATS + 1) * sum(len(sizes) for _, sizes, _ in tables)
    for context, sizes, tree in tables:
        cache.lengthen(context - cache.length)
        mx.eval(cache.arrays)
        seconds = []
        for rows in sizes:
            block, times = _tree_of(rows) if tree else Block(rows), []
            for _ in range(_REPEATS + 1):  # the first may build what the others use
                times.append(_time_pass(target, cache, block, words))
                yield passes
            seconds.append(min(times[1:]))
        found.append(PassTimes(sizes, tuple(seconds), context))
    first, *deeper = found[dearer:]
    return replace(first, deeper=tuple(deeper), trees=found[0] if dearer else None)


def _fits(cache: SequenceCache, context: int) -> bool:
    """Whether the memory has room to make a cache so long; nothing is computed for that."""
    longer = cache.fork()
    longer.lengthen(context - longer.length)
    return _COPIES * longer.nbytes <= free_memory() // 2


def _tree_of(rows: int) -> Block:
    return Block.of(Tree((0,) * (rows - 1), (-1, *((i - 1) // 2 for i in range(1, rows)))))


def _time_pass(target: Target, cache: SequenceCache, block: Block, words: mx.array) -> float:
    start = time.perf_counter()
    mx.eval(mx.argmax(target.forward(words[: block.rows], cache, block)[0], axis=-1))
    took = time.perf_counter() - start
    cache.discard()
    return took


def stored_times(target: Target, folder: Path | None = None) -> PassTimes | None:
    """What was measured of this machine, model and MLX before; None where nothing can be read."""
    try:
        return read_times(_file(target, folder))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_times(target: Target, times: PassTimes, folder: Path | None = None) -> None:
    """For `stored_times`, and the target's from now on; a file that cannot be written is not."""
    target.pass_times, target.was_timed = times, True
    keep_text(_file(target, folder), json.dumps({"model": target.name, **asdict(times)}))


def calibrating(target: Target, again: bool = False) -> Generator[int, None, None]:
    """The steps of `measuring`, and then the target has its times; none where it has them before.

    again: though this machine was measured before, but not by this program.
    """
    if target.pass_times is None and not again:
        target.pass_times = stored_times(target)
    if target.pass_times is None or (again and not target.was_timed):
        keep_times(target, (yield from measuring(target)))


def noticed(target: Target, rows: int, lengths: Sequence[float], seconds: float) -> None:
    """A real pass took so long; times that are off by 30 % are measured again by the next start.

    lengths: of the sequences in it. Power modes, heat and other programs change what a pass takes.
    """
    if target.pass_times is None:
        return
    target.drift.append(seconds / float(target.pass_times.of(rows, lengths)))
    if len(target.drift) >= _NOTICED:
        middle = float(np.median(target.drift))
        target.drift.clear()
        if not 1 / (1 + _DRIFT) <= middle <= 1 + _DRIFT:
            with suppress(OSError):
                _file(target).unlink()


def timing_day(target: Target) -> str:
    """The day on which `stored_times` measured, as in "2026-11-22"; "" where nothing is stored."""
    try:
        taken = _file(target).stat().st_mtime
    except OSError:
        return ""
    return date.fromtimestamp(taken).isoformat()


def read_times(file: Path) -> PassTimes:
    """What `keep_times` kept. OSError, ValueError, KeyError or TypeError for anything else."""
    times = _read(kept_json(file))
    if times.rows != ROWS or any(deep.rows != DEEP_ROWS for deep in times.deeper):
        raise ValueError("times of other rows")
    return times


def _read(stored: dict[str, Any]) -> PassTimes:
    rows, seconds = tuple(stored["rows"]), tuple(float(s) for s in stored["seconds"])
    if len(rows) != len(seconds) or min(seconds) <= 0:
        raise ValueError("not a time for every number of rows")
    deeper, trees = tuple(map(_read, stored["deeper"])), stored["trees"]
    return PassTimes(rows, seconds, int(stored["context"]), deeper, trees and _read(trees))


def _file(target: Target, folder: Path | None = None) -> Path:
    kernels = target.kernels.mode if target.kernels.active else "off"
    key = model_key(target.name, target.parameters(), kernels, target.kv_bits)
    return (folder or platformdirs.user_cache_path("dflash-chat") / "timing") / f"{key}.json"
