"""How much of a draft is worth verifying on this machine.

A wider pass accepts more and takes longer. The time of a target pass is measured once per machine
and model, a node's chance of being accepted is estimated from its drafter's confidence and from
what became of such nodes so far, and the part of the tree that promises most tokens per second is
kept.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import platformdirs
from tqdm import tqdm

from dflash_mlx.accept import Accepted
from dflash_mlx.cache import Block
from dflash_mlx.drafters.base import Drafter
from dflash_mlx.drafters.save import replace_text
from dflash_mlx.machine import describe_machine, describe_versions
from dflash_mlx.state import Context, State
from dflash_mlx.target import Target
from dflash_mlx.tree import Tree

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
_CONTEXT = 128  # tokens before the measured passes
_REPEATS = 3
_BINS = 10  # of confidence
_DEPTHS = 8  # told apart; deeper nodes count as the last
_PRIOR = 8.0  # nodes that a drafter's own confidence weighs as much as
_RECENT = 16  # drafts whose time is remembered


@dataclass(frozen=True)
class PassTimes:
    """seconds[i]: of a target pass over rows[i] tokens."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, rows: npt.NDArray[Any] | int) -> npt.NDArray[Any]:
        """Interpolated, and never less for more rows."""
        rising = np.maximum.accumulate(self.seconds)
        return np.asarray(np.interp(rows, self.rows, rising))


def measure(target: Target) -> PassTimes:
    """Time trees of 1 to 96 rows behind 128 tokens; the median of three each, a few seconds."""
    cache = target.new_cache()
    target.check_trees()
    prompt = mx.zeros(_CONTEXT, mx.int32)
    mx.eval(target.forward(prompt, cache, Block(_CONTEXT))[0], cache.arrays)
    cache.commit(range(_CONTEXT))
    seconds = []
    for rows in tqdm(ROWS, desc="timing this machine, once", leave=False):
        tree = Tree(mx.zeros(rows, mx.int32), (-1, *((i - 1) // 2 for i in range(1, rows))))
        times = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            mx.eval(mx.argmax(target.forward(tree.tokens, cache, Block.of(tree))[0], axis=-1))
            times.append(time.perf_counter() - start)
            cache.discard()
        seconds.append(median(times[1:]))
    return PassTimes(ROWS, tuple(seconds))


def stored_times(target: Target, again: bool = False, folder: Path | None = None) -> PassTimes:
    """As `measure`, from the cache folder where this machine, model and MLX were measured before.

    again: measure anyway. A file that cannot be read or written is done without.
    """
    folder = folder or platformdirs.user_cache_path("dflash-chat") / "timing"
    file = folder / f"{_key(target)}.json"
    try:
        if not again:
            return _parse(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    times = measure(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(vars(times)))
    except OSError:
        pass
    return times


def _parse(stored: dict[str, Any]) -> PassTimes:
    times = PassTimes(tuple(stored["rows"]), tuple(float(s) for s in stored["seconds"]))
    if times.rows != ROWS or len(times.seconds) != len(ROWS) or min(times.seconds) <= 0:
        raise ValueError("times of other rows")
    return times


def _key(target: Target) -> str:
    weights = [(name, array.shape, str(array.dtype)) for name, array in target.parameters()]
    about = (describe_machine(), describe_versions(), target.name, weights)
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


class Reliability:
    """How often drafted tokens were right, by confidence and depth.

    A cell starts at the confidence itself, as if it had been seen to hold for a few tokens.
    """

    def __init__(self) -> None:
        self.tried = np.zeros((_DEPTHS, _BINS))
        self.right = np.zeros((_DEPTHS, _BINS))

    def chances(self, tree: Tree) -> npt.NDArray[Any]:
        """[N] estimated probability that each node is accepted, given that its parent is."""
        confidence = np.exp(np.array(tree.logprobs))
        cells = _cells(tree.depths, confidence)
        tried, right = self.tried[cells], self.right[cells]
        chances: npt.NDArray[Any] = (right + _PRIOR * confidence) / (tried + _PRIOR)
        chances[0] = 1.0
        return chances

    def learn(self, accepted: Accepted) -> None:
        """Count the children of every node on the accepted path."""
        tree, path = accepted.tree, set(accepted.path)
        tested = [i for i in range(1, len(tree)) if tree.parents[i] in path]
        confidence = np.exp(np.array([tree.logprobs[i] for i in tested]))
        cells = _cells([tree.depths[i] for i in tested], confidence)
        np.add.at(self.tried, cells, 1)
        np.add.at(self.right, cells, [i in path for i in tested])


def _cells(depths: Sequence[int], confidence: npt.NDArray[Any]) -> tuple[Any, Any]:
    """Indices of depth and confidence."""
    rows = np.clip(np.array(depths, dtype=int), 1, _DEPTHS) - 1
    return rows, np.clip((confidence * _BINS).astype(int), 0, _BINS - 1)


def reach(tree: Tree, chances: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[N] probability that a node and all before it are accepted."""
    result = np.ones(len(tree))
    for node in range(1, len(tree)):
        result[node] = result[tree.parents[node]] * chances[node]
    return result


def worth_keeping(
    reached: npt.NDArray[Any], seconds: Callable[[Any], npt.NDArray[Any]], draft_seconds: float
) -> list[int]:
    """The nodes that promise most tokens per second, in order; the root is always among them.

    reached: [N] as `reach` gives it. seconds: of a target pass over n rows. Maximises
    (1 + expected accepted) / (draft + pass) over the n likeliest nodes, which are closed under
    parents because no node is likelier than its parent.
    """
    order = np.argsort(-reached, kind="stable")
    sizes = np.arange(1, len(reached) + 1)
    rate = np.cumsum(reached[order]) / (draft_seconds + seconds(sizes))
    return sorted(order[: int(np.argmax(rate)) + 1].tolist())


class Budgeted:
    """Another drafter's trees, cut to the part that pays."""

    rounds_ahead = 0

    def __init__(self, drafter: Drafter, times: PassTimes) -> None:
        self.name, self.taps = drafter.name, drafter.taps
        self.reliability = Reliability()
        self._drafter, self._times = drafter, times
        self._drafts: deque[float] = deque(maxlen=_RECENT)
        self._proposed: Tree | None = None

    def new_context(self) -> Context:
        """The drafter's own."""
        return self._drafter.new_context()

    def propose(self, state: State, room: int) -> Tree:
        """The part of the drafter's tree with the most expected tokens per second."""
        if state.last is not None and state.last.tree is self._proposed:
            self.reliability.learn(state.last)
        start = time.perf_counter()
        tree = self._drafter.propose(state, room)
        self._drafts.append(time.perf_counter() - start)
        if tree.logprobs:
            reached = reach(tree, self.reliability.chances(tree))
            tree = tree.only(worth_keeping(reached, self._times.of, median(self._drafts)))
        self._proposed = tree
        return tree
