"""Faults for the real kernels: what is run, what is broken, and who finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kernels_metal.cache_commit import accepted_rows, accepted_rows_reference
from kernels_metal.cascade_attention import cascade_attention
from kernels_metal.draft_head import draft_head
from kernels_metal.tree_walk import tree_walk
from kernels_metal.verify_qmm import Packing, verify_qmm
from support import kernel_cases as cases
from support.kernel_cases import Attention

Pairs = Sequence[tuple[np.ndarray, np.ndarray]]


# What is run: the kernel's results and the right ones


def attention(shape: Attention) -> Callable[[], Pairs]:
    def compare() -> Pairs:
        arguments = shape.arguments(mx.float32)
        return [(cases.exact(cascade_attention(*arguments)), cases.attend(*arguments))]

    return compare


TREE = attention(Attention(64, 4, 2, 9, 70))
MANY_ROWS = attention(Attention(64, 1, 1, 65, 70))
WIDE = attention(Attention(256, 2, 1, 5, 20))
WINDOW = attention(Attention(64, 2, 1, 4, 600, window=True, sinks=True))
SLICE = attention(Attention(64, 2, 2, 3, 40, start=5, slack=30, transposed=True))


def drafting() -> Pairs:
    """Some logits are equal, so the lower id must win."""
    rng = np.random.default_rng(0)
    rounded = np.round(rng.standard_normal((3, 9000)) * 4).astype(np.float32)
    logits = mx.array(np.concatenate([rounded, np.zeros((1, 9000), np.float32)]))
    head = draft_head(logits, 4)
    values = cases.exact(logits)
    ids = np.argsort(-values, axis=1, kind="stable")[:, :4]
    normal = cases.log_sum_exp(logits)
    logprobs = np.take_along_axis(values, ids, axis=1) - normal[:, None]
    return [
        (np.array(head.ids), ids),
        (cases.exact(head.logprobs), logprobs),
        (cases.exact(head.logsumexp), normal),
    ]


def walking() -> Pairs:
    tree = cases.random_tree(np.random.default_rng(2), 70, deep=True)
    arrays = [mx.array(np.array(part, np.int32)) for part in tree]
    return [(np.array(tree_walk(*arrays)), np.array(cases.walk(*tree)))]


def committing() -> Pairs:
    rng = np.random.default_rng(0)
    shapes = [(1, 2, 40, 8), (1, 3, 50, 8), (1, 2, 41, 8)]
    caches = [cases.normal(rng, shape)[:, :, :-3] for shape in shapes]
    caches[2] = cases.normal(rng, (1, 20, 2, 8)).swapaxes(1, 2)
    arguments = caches, [0, 2, 5, 9, 10], [3, 30, 9]
    pairs = zip(accepted_rows(*arguments), accepted_rows_reference(*arguments), strict=True)
    return [(cases.exact(ours), cases.exact(wanted)) for ours, wanted in pairs]


def multiplying(rows: int = 5, depth: int = 576, columns: int = 11, bits: int = 4):
    def compare() -> Pairs:
        rng = np.random.default_rng(0)
        arguments = cases.quantised(rng, rows, depth, columns, mx.float32, Packing(bits, 32))
        return [(cases.exact(verify_qmm(*arguments)), cases.multiply(*arguments))]

    return compare


PRODUCT = multiplying()
RUNS = [TREE, WIDE, MANY_ROWS, WINDOW, SLICE, drafting, walking, committing, PRODUCT]


@dataclass(frozen=True)
class Fault:
    """`before` in `file` becomes `after`; running `run` must find it as `found`.

    `found` is a kind of EmulatorError, or "result" for the comparison; of two, which one comes
    first depends on the order of the threads.
    """

    name: str
    file: str
    before: str
    after: str
    run: Callable[[], Pairs]
    found: str


ATTENTION, MERGE, COMMIT, PRODUCTS = (
    "cascade_attention",
    "cascade_merge",
    "cache_commit",
    "verify_qmm",
)
DRAFT, DRAFT_MERGE, LISTS, WALK = "draft_head", "draft_head_merge", "top_k", "tree_walk"

# fmt: off
FAULTS = [
    # Missing and wrong barriers
    Fault("no barrier before the next tile", ATTENTION,
          "tile += KEYS) {\n  threadgroup_barrier(mem_flags::mem_threadgroup);", "tile += KEYS) {",
          TREE, "race"),
    Fault("no barrier after the tile is loaded", ATTENTION,
          "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
          "  for (int block",
          TREE, "uninitialised"),
    Fault("barrier for the wrong memory", ATTENTION,
          "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
          "threadgroup_barrier(mem_flags::mem_device);\n\n  for (int block",
          TREE, "race"),
    Fault("barrier of the SIMD-group instead of the threadgroup", ATTENTION,
          "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
          "  simdgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (int block",
          TREE, "uninitialised"),
    Fault("no barrier between weights and their use", ATTENTION,
          "    simdgroup_barrier(mem_flags::mem_threadgroup);\n\n    for (int k", "    for (int k",
          TREE, "uninitialised or race"),
    Fault("no barrier before the weights of the next rows", ATTENTION,
          "    simdgroup_barrier(mem_flags::mem_threadgroup);\n\n    if (tile", "    if (tile",
          MANY_ROWS, "race"),
    Fault("no barrier between the groups' best and the choice", DRAFT,
          "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "",
          drafting, "uninitialised or race"),
    Fault("no barrier between the groups' sums", PRODUCTS,
          "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "",
          PRODUCT, "uninitialised or race"),
    # Races
    Fault("every lane writes the group's peak", DRAFT,
          "if (lane == 0) {\n  group_sums[group * 2] = ", "if (true) {\n  group_sums[group * 2] = ",
          drafting, "race"),
    Fault("all SIMD-groups write one sum", PRODUCTS,
          "group_sums[group * 32 + m", "group_sums[m",
          PRODUCT, "race"),
    Fault("every lane writes the root", WALK,
          "if (lane == 0) {\n  result[2]", "if (true) {\n  result[2]",
          walking, "race"),
    Fault("two splits write one place", ATTENTION,
          "(int64_t(split) * threadgroups_per_grid.x + head)", "(int64_t(0) + head)",
          WINDOW, "race"),
    # Divergence
    Fault("a lane stays away from the maximum", ATTENTION,
          "if (i < count) {\n        float score",
          "if (i < count && lane < 31) {\n        float score",
          TREE, "divergence"),
    Fault("only the first lanes add up", PRODUCTS,
          "  if (m < rows) {\n"
          "    for (int c = 0; c < COLS; ++c) {\n"
          "      const float sum = simd_sum",
          "  if (m < rows && lane < 16) {\n"
          "    for (int c = 0; c < COLS; ++c) {\n"
          "      const float sum = simd_sum",
          PRODUCT, "divergence"),
    Fault("idle lanes leave before the SIMD-group's sum", DRAFT_MERGE,
          "float peak = -INFINITY;", "if (lane >= parts) return;\nfloat peak = -INFINITY;",
          drafting, "divergence"),
    Fault("the threads of other groups skip the barrier", DRAFT,
          "threadgroup_barrier(mem_flags::mem_threadgroup);\n",
          "if (group < 7) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n",
          drafting, "divergence"),
    # Bounds
    Fault("one key too many", ATTENTION,
          "if (slot < end) {\n      for", "if (slot <= end) {\n      for",
          TREE, "bounds"),
    Fault("one slot too far in a slice", ATTENTION,
          "+ slot * keys_strides[2]", "+ (slot + 30) * keys_strides[2]",
          SLICE, "bounds or result"),
    Fault("one split too many", MERGE,
          "split < splits; ++split", "split <= splits; ++split",
          WINDOW, "bounds"),
    Fault("one token too many", DRAFT,
          "const int end = min(begin + sizes[0], vocabulary);", "const int end = begin + sizes[0];",
          drafting, "bounds or result"),
    Fault("lists too short", DRAFT,
          "group_values[SIMD_GROUPS * TOP]", "group_values[SIMD_GROUPS * TOP - 1]",
          drafting, "bounds"),
    Fault("one node too many", WALK,
          "i < nodes; i += 32) {\n    if", "i <= nodes; i += 32) {\n    if",
          walking, "bounds"),
    Fault("one thread too many", COMMIT,
          "if (element >= heads", "if (element > heads",
          committing, "bounds"),
    Fault("a column behind the last", PRODUCTS,
          "if (begin + n < columns)", "if (begin + n <= columns)",
          PRODUCT, "bounds or race"),
    Fault("too few sums", PRODUCTS,
          "group_sums[SIMD_GROUPS * 32]", "group_sums[SIMD_GROUPS * 16]",
          PRODUCT, "bounds"),
    # Uninitialised
    Fault("the sum of weights starts anywhere", ATTENTION,
          "        total[i] = 0.0f;\n", "",
          TREE, "uninitialised"),
    Fault("sums start anywhere", PRODUCTS,
          "  sums[i] = 0.0f;\n", "",
          PRODUCT, "uninitialised"),
    Fault("a list starts anywhere", LISTS,
          "    values[i] = -INFINITY;\n", "",
          drafting, "result or uninitialised"),
    Fault("a peak without a value", DRAFT_MERGE,
          "float peak = -INFINITY;", "float peak;",
          drafting, "uninitialised"),
    # Unwritten
    Fault("nobody writes the largest scores", ATTENTION,
          "          if (lane == 0) {", "          if (lane == 32) {",
          TREE, "unwritten"),
    Fault("half of the head dim is never written", MERGE,
          "d < width; d += 32", "d < width / 2; d += 32",
          TREE, "unwritten"),
    Fault("the end of the path is never filled", WALK,
          "int i = length + lane", "int i = length + lane + 1",
          walking, "unwritten"),
    Fault("one thread too few", COMMIT,
          "if (element >= heads * rows * width)", "if (element + 1 >= heads * rows * width)",
          committing, "unwritten"),
    # Address spaces, inputs, the language
    Fault("a query pointer into threadgroup memory", ATTENTION,
          "const device T* row", "const threadgroup T* row",
          TREE, "address space"),
    Fault("a cache is written", COMMIT,
          "    rows0[element] =\n        cache0[",
          "    rows0[element] = 0; ((device float*)cache0)[0] = 0 * \n        cache0[",
          committing, "read-only"),
    Fault("a pointer without address space", LISTS,
          "inline void clear_list(thread float* values", "inline void clear_list(float* values",
          drafting, "lint"),
    Fault("a sum in double precision", PRODUCTS,
          "    float sum = 0.0f;", "    double sum = 0.0;",
          PRODUCT, "lint"),
    # Wrong results
    Fault("one of four numbers is taken twice", "widen",
          "float(x[3])", "float(x[2])",
          PRODUCT, "result"),
    Fault("the wrong bit of the mask", ATTENTION,
          ">> (local % 32)", ">> (31 - local % 32)",
          TREE, "result"),
    Fault("the mask of the next row", ATTENTION,
          "% sizes[0] * (1 + words)", "% sizes[0] * words",
          TREE, "result or bounds"),
    Fault("the window begins one key late", ATTENTION,
          "slot >= int(visible[seen])", "slot > int(visible[seen])",
          WINDOW, "result"),
    Fault("old sums are not scaled", ATTENTION,
          "total[i] = total[i] * keep +", "total[i] = total[i] +",
          TREE, "result"),
    Fault("a shuffle too few", ATTENTION,
          "int apart = KEYS;", "int apart = 2 * KEYS;",
          WIDE, "result"),
    Fault("sinks do not count", MERGE,
          "simd_sum(total) + exp(sink - top)", "simd_sum(total)",
          WINDOW, "result"),
    Fault("of equal logits the last wins", LISTS,
          "value == values[i] && id < ids[i]", "value == values[i] && id > ids[i]",
          drafting, "result"),
    Fault("parts are added without scaling", DRAFT_MERGE,
          "total * rescale(peak, row_peak)", "total",
          drafting, "result"),
    Fault("a child of any parent", WALK,
          "parents[i] == node && tokens", "tokens",
          walking, "result"),
    Fault("the path begins at slot 0", COMMIT,
          "sizes[cache * 4 + 2] + path", "path",
          committing, "result"),
    Fault("the lowest bit of a weight is lost", PRODUCTS,
          "((1u << BITS) - 1)", "((1u << BITS) - 2)",
          PRODUCT, "result"),
    Fault("part of K is left out", PRODUCTS,
          "k < depth;", "k < depth / 2;",
          PRODUCT, "result"),
]
# fmt: on
