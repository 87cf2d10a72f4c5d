"""The operations that `dispatch` chooses for: kernel, reference, and what a choice depends on."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from kernels_metal import cache_commit, cascade_attention, draft_head, tree_walk, verify_qmm
from kernels_metal.dispatch import Operation, bucket, dtype_name

Key = tuple[int, tuple[int, ...], int, str]


def _of(
    rows: int, shape: tuple[int, ...], arrays: Sequence[mx.array], bits: int | None = None
) -> Key:
    """dtype: one for all arrays, or that of each where they differ; bits: of the first."""
    bits = arrays[0].itemsize * 8 if bits is None else bits
    dtypes = [array.dtype for array in arrays]
    alike = all(dtype == dtypes[0] for dtype in dtypes)
    return bucket(rows), shape, bits, "+".join(map(dtype_name, dtypes[:1] if alike else dtypes))


def _cascade_case(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: cascade_attention.Visibility,
    scale: float,
    sinks: mx.array | None = None,
) -> Key:
    heads = (queries.shape[1], keys.shape[1], queries.shape[3], values.shape[3])
    arrays = [queries, keys, values, *([] if sinks is None else [sinks])]
    return _of(queries.shape[2], (*heads, bucket(seen.keys), int(sinks is not None)), arrays)


def _draft_head_case(logits: mx.array, k: int) -> Key:
    return _of(logits.shape[0], (logits.shape[1], k), [logits])


def _tree_walk_case(choices: mx.array, tokens: mx.array, parents: mx.array) -> Key:
    return _of(choices.shape[0], (), [choices, tokens, parents])


def _cache_commit_case(
    caches: Sequence[mx.array], path: Sequence[int], first: Sequence[int]
) -> Key:
    return _of(len(path), (len(caches), caches[0].shape[1], caches[0].shape[3]), caches)


def _verify_qmm_case(
    x: mx.array,
    weights: mx.array,
    scales: mx.array,
    biases: mx.array,
    packing: verify_qmm.Packing,
) -> Key:
    shape = (x.shape[1], weights.shape[0], packing.group, int(packing.invariant))
    return _of(x.shape[0], shape, [x, scales, biases], packing.bits)


def _head_arrays(head: draft_head.DraftHead, logits: mx.array, k: int) -> list[mx.array]:
    """For the ids the log-probabilities they have: of equal logits either may be chosen."""
    known = (head.ids >= 0) & (head.ids < logits.shape[1])
    chosen = mx.take_along_axis(logits, mx.where(known, head.ids, 0), axis=-1)
    chosen = chosen.astype(mx.float32) - head.logsumexp[:, None]
    return [head.logprobs, mx.where(known, chosen, mx.nan), head.logsumexp]


CASCADE_ATTENTION = Operation(
    "cascade_attention",
    cascade_attention.cascade_attention,
    cascade_attention.cascade_attention_reference,
    cascade_attention.check_arguments,
    _cascade_case,
    lambda out, *args: [out],
)
DRAFT_HEAD = Operation(
    "draft_head",
    draft_head.draft_head,
    draft_head.draft_head_reference,
    draft_head.check_arguments,
    _draft_head_case,
    _head_arrays,
)
TREE_WALK = Operation(
    "tree_walk",
    tree_walk.tree_walk,
    tree_walk.tree_walk_reference,
    tree_walk.check_arguments,
    _tree_walk_case,
    lambda result, *args: [result],
)
CACHE_COMMIT = Operation(
    "cache_commit",
    cache_commit.accepted_rows,
    cache_commit.accepted_rows_reference,
    cache_commit.check_arguments,
    _cache_commit_case,
    lambda rows, *args: rows,
)
VERIFY_QMM = Operation(
    "verify_qmm",
    verify_qmm.verify_qmm,
    verify_qmm.verify_qmm_reference,
    verify_qmm.check_arguments,
    _verify_qmm_case,
    lambda y, *args: [y],
)
OPERATIONS = (CASCADE_ATTENTION, DRAFT_HEAD, TREE_WALK, CACHE_COMMIT, VERIFY_QMM)
