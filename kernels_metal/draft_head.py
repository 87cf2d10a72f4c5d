"""The likeliest tokens of a draft with their log-probabilities, in one pass over the logits."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kernels_metal.checks import check, check_array, check_range
from kernels_metal.factory import Kernel, Launch, launch
from kernels_metal.operation import ROWS, Draw, Operation, case_of

MAX_ROWS = 1024
MAX_K = 16
PART = 8192  # logits of one threadgroup, while a row has no more than 32 parts
KERNEL = Kernel(
    "draft_head",
    inputs=("logits", "sizes"),
    outputs=("best_values", "best_ids", "sums"),
    header="top_k",
)
MERGE = Kernel(
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


def draft_head(logits: mx.array, k: int) -> DraftHead:
    """The k likeliest tokens of each row of logits [rows, V], k up to 16 and to V.

    logits: float32, float16 or bfloat16; sums are float32. Of equal logits the lower id comes first
    (the reference may choose others where more are equal than fit). Raises ValueError otherwise.
    """
    check_arguments(logits, k)
    rows, vocabulary = logits.shape
    length = max(PART, -(-vocabulary // 32))
    parts = -(-vocabulary // length)
    top = _kept(k)
    plan = Launch(
        grid=(parts * 256, rows, 1),
        threadgroup=(256, 1, 1),
        output_shapes=((rows, parts, top), (rows, parts, top), (rows, parts, 2)),
        output_dtypes=(mx.float32, mx.int32, mx.float32),
        template=(("T", logits.dtype), ("TOP", top)),
    )
    found = launch(KERNEL, [logits, mx.array([length])], plan)
    merge = Launch(
        grid=(32, rows, 1),
        threadgroup=(32, 1, 1),
        output_shapes=((rows, top), (rows, top), (rows,)),
        output_dtypes=(mx.int32, mx.float32, mx.float32),
        template=(("TOP", top),),
    )
    ids, logprobs, normal = launch(MERGE, found, merge)
    return DraftHead(ids[:, :k], logprobs[:, :k], normal)


def _kept(k: int) -> int:
    """The k that a kernel is made for."""
    return 4 if k <= 4 else MAX_K


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
    check_array("logits", logits, (None, None))
    check_range("the rows of logits", logits.shape[0], 1, MAX_ROWS)
    check_range("k", k, 1, MAX_K)
    check(k <= logits.shape[1], "k", k, f"up to the {logits.shape[1]} columns of logits")


def _compared(head: DraftHead, logits: mx.array, k: int) -> list[mx.array]:
    """For the ids the log-probabilities they have: of equal logits either may be chosen."""
    known = (head.ids >= 0) & (head.ids < logits.shape[1])
    chosen = mx.take_along_axis(logits, mx.where(known, head.ids, 0), axis=-1)
    chosen = chosen.astype(mx.float32) - head.logsumexp[:, None]
    return [head.logprobs, mx.where(known, chosen, mx.nan), head.logsumexp]


def _arguments(draw: Draw) -> tuple[mx.array, int]:
    rows, k = draw.size("rows", ROWS), draw.size("k", range(1, MAX_K + 1))
    most = 32_000 if rows < 9 else 2000
    vocabulary = draw.size("vocabulary", (17, 100, 255, 257, 1000, 8193, most))
    return draw.normal(rows, vocabulary), k


DRAFT_HEAD = Operation(
    name="draft_head",
    kernel=draft_head,
    reference=draft_head_reference,
    check=check_arguments,
    case=lambda logits, k: case_of(logits.shape[0], (logits.shape[1], k), [logits]),
    kernels=(KERNEL, MERGE),
    arguments=_arguments,
    defaults={"rows": 8, "vocabulary": 32_000, "k": 8},
    compared=_compared,
    tried=lambda logits, k: (str(_kept(k)), [{"k": _kept(k)}]),
    variants=[{"k": 4}, {"k": MAX_K}],
)
