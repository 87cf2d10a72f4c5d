"""What the host spends on a target's pass: microseconds of Python, nodes of MLX's graph, launches.

Passes are built behind a few tokens and dropped; nothing is computed. So the figures are exact on
any machine, if not the same on all: MLX has one node for a norm, a rotation or attention on a Mac
and several elsewhere. `scripts/host_cost.py` has them for other programs as well.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import SequenceCache

BEFORE = 4  # tokens in the caches
REPEATS = 20  # the fastest counts


class HostCost(NamedTuple):
    """Of building one pass; launches: of custom kernels, among the nodes."""

    microseconds: float
    nodes: int
    launches: int


def host_cost(target: Target, rows: int, aux_layers: tuple[int, ...] = ()) -> HostCost:
    """Of a pass over a chain of `rows`, down to the greedy choices, with these features."""
    build, fork = passes_of(target, rows, aux_layers)
    build(fork())  # what is chosen or settled at the first pass of this shape
    return HostCost(fastest(build, fork), *nodes_of(*build(fork())))


def passes_of(
    target: Target, rows: int, aux_layers: tuple[int, ...] = ()
) -> tuple[Callable[[SequenceCache], list[mx.array]], Callable[[], SequenceCache]]:
    """What builds a pass, and what makes a cache to build it behind."""
    sequence = target.new_cache()
    target.forward(mx.zeros(BEFORE, mx.int32), sequence, Block(BEFORE))
    sequence.commit(range(BEFORE))
    mx.eval(sequence.arrays)
    tokens = mx.zeros(rows, mx.int32)

    def build(behind: SequenceCache) -> list[mx.array]:
        logits, features = target.forward(tokens, behind, Block(rows), aux_layers)
        return [mx.argmax(logits, axis=-1), *([] if features is None else [features])]

    return build, sequence.fork


def fastest(
    build: Callable[[Any], object], prepare: Callable[[], Any], repeats: int = REPEATS
) -> float:
    """Microseconds of `build`, of what `prepare` gives: this thread's own, whoever else runs."""
    times = []
    for _ in range(repeats):
        given = prepare()
        begin = time.thread_time()
        made = build(given)
        times.append(time.thread_time() - begin)
        del made  # a graph is taken apart when nobody waits for it
    return min(times) * 1e6


def nodes_of(*outputs: mx.array) -> tuple[int, int]:
    """Operations in the graph of arrays that are not computed, and custom kernels among them."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    made = [line for line in text.getvalue().splitlines() if "shape=rectangle" in line]
    return len(made), sum("CustomKernel" in line for line in made)


def by_method(
    target: Target, methods: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """For each method's figures: the pass over a chain of as many rows as its rounds have.

    us_a_pass: microseconds, us_a_token: for each committed token. The draft's own pass is not
    counted. Features are taken as the pair's draft models ask, and with one row none.
    """
    costs: dict[int, HostCost] = {}
    found = {}
    for name, figures in methods.items():
        rows = max(1, round(figures["rows_per_round"]))
        if rows not in costs:
            costs[rows] = host_cost(target, rows, target.aux_layers if rows > 1 else ())
        microseconds, nodes, launches = costs[rows]
        tokens = figures["mean_accepted"] or 1
        found[name] = {
            "rows": rows,
            "nodes": nodes,
            "launches": launches,
            "us_a_pass": microseconds,
            "us_a_token": microseconds / tokens,
        }
    return found
