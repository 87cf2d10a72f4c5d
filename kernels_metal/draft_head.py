"""The likeliest tokens of a draft with their log-probabilities, in one pass over the logits."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kernels_metal.checks import check, check_dtype, check_range, check_shape
from kernels_metal.factory import Kernel, Launch, executor, launch

MAX_ROWS = 1024
MAX_K = 16
PART = 8192  # logits of one threadgroup, while a row has no more than 32 parts
DRAFT_HEAD = Kernel(
    "draft_head",
    inputs=("logits", "sizes"),
    outputs=("best_values", "best_ids", "sums"),
    header="top_k",
)
DRAFT_HEAD_MERGE = Kernel(
    "draft_head_merge",
    inputs=("best_values", "best_ids", "sums"),
    outputs=("ids", "logprobs", "normal"),
    header="top_k",
)


@dataclass(frozen=True)
class DraftHead:
    """The k likeliest tokens of each row, the likeliest first.

    ids: [rows, k] int32. logprobs: [rows, k] float32. logsumexp: [rows] float32.
    """

    ids: mx.array
    logprobs: mx.array
    logsumexp: mx.array

    @property
    def tokens(self) -> mx.array:
        """[rows] the likeliest of each."""
        return self.ids[:, 0]


def draft_head(logits: mx.array, k: int) -> DraftHead:
    """The k likeliest tokens of each row of logits [rows, V], k up to 16 and to V.

    logits: float32, float16 or bfloat16; sums are float32. Of equal logits the lower id comes first
    (the reference may choose others where more are equal than fit). Raises ValueError otherwise.
    """
    check_arguments(logits, k)
    if executor() is None:
        return draft_head_reference(logits, k)
    rows, vocabulary = logits.shape
    length = max(PART, -(-vocabulary // 32))
    parts = -(-vocabulary // length)
    top = 4 if k <= 4 else MAX_K
    plan = Launch(
        grid=(parts * 256, rows, 1),
        threadgroup=(256, 1, 1),
        output_shapes=((rows, parts, top), (rows, parts, top), (rows, parts, 2)),
        output_dtypes=(mx.float32, mx.int32, mx.float32),
        template=(("T", logits.dtype), ("TOP", top)),
    )
    found = launch(DRAFT_HEAD, [logits, mx.array([length])], plan)
    merge = Launch(
        grid=(32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=((rows, top), (rows, top), (rows,)),
        output_dtypes=(mx.int32, mx.float32, mx.float32),
        template=(("TOP", top),),
    )
    ids, logprobs, normal = launch(DRAFT_HEAD_MERGE, found, merge)
    return DraftHead(ids[:, :k], logprobs[:, :k], normal)


def draft_head_reference(logits: mx.array, k: int) -> DraftHead:
    """As `draft_head`, in MLX: a selection, a sort of what was selected, a sum."""
    logits = logits.astype(mx.float32)
    top = mx.argpartition(-logits, k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logits, top, axis=-1)
    order = mx.argsort(-values, axis=-1)
    normal = mx.logsumexp(logits, axis=-1)
    ids = mx.take_along_axis(top, order, axis=-1).astype(mx.int32)
    logprobs = mx.take_along_axis(values, order, axis=-1) - normal[:, None]
    return DraftHead(ids, logprobs, normal)


def check_arguments(logits: mx.array, k: int) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits)
    check_range("the rows of logits", logits.shape[0], 1, MAX_ROWS)
    check_range("k", k, 1, MAX_K)
    check(k <= logits.shape[1], "k", k, f"up to the {logits.shape[1]} columns of logits")
