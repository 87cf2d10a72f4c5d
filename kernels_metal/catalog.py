"""The table of operations. A new one is a line here; its file has all the rest."""

from __future__ import annotations

from kernels_metal.cache_commit import CACHE_COMMIT
from kernels_metal.cascade_attention import CASCADE_ATTENTION
from kernels_metal.delta_net import DELTA_NET
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.norm_rope import NORM_ROPE
from kernels_metal.operation import Operation
from kernels_metal.verify_qmm import VERIFY_QMM

OPERATIONS: tuple[Operation, ...] = (
    CASCADE_ATTENTION,
    DRAFT_HEAD,
    CACHE_COMMIT,
    VERIFY_QMM,
    NORM_ROPE,
    DELTA_NET,
)
CATALOG = {kernel.name: operation for operation in OPERATIONS for kernel in operation.kernels}
