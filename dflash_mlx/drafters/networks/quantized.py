"""Drafter networks whose matrices are stored in 4 or 8 bits, in MLX's own packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from dflash_mlx.core.errors import DFlashError

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
_AT_LOAD = (64, 32)  # the largest that fits is taken where none is asked for
# Small, and what they add decides between near candidates
KEPT = ("candidate_selector", "markov_head", "confidence_head")


@dataclass(frozen=True)
class Quantization:
    """How matrices are packed; names as in the config.json of MLX folders."""

    group_size: int
    bits: int


def quantize_network(network: nn.Module, bits: int, group_size: int | None = None) -> None:
    """Pack the matrices of a drafter network in place, lazily.

    Norms, DFlash 2's base kernels, its candidate selector and DSpark's heads keep their numbers; so
    does what is packed already. bits: 4 or 8. group_size: numbers that share a scale and a bias,
    32, 64 or 128; None for the larger of 64 and 32 that fits all of them. Raises DFlashError for
    other values, and where a matrix has rows of a length that the groups do not divide.
    """
    if bits not in BITS:
        raise DFlashError(f"bits of a quantised drafter is {bits!r}", f"choose one of {BITS}")
    if group_size not in (None, *GROUP_SIZES):
        raise DFlashError(
            f"group_size of a quantised drafter is {group_size!r}", f"choose one of {GROUP_SIZES}"
        )
    size = _group_size(network, group_size)
    nn.quantize(network, size, bits, class_predicate=_is_packed)


def quantization_of(network: nn.Module) -> Quantization | None:
    """How the network's matrices are packed, None where they are not."""
    for _, module in network.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            return Quantization(module.group_size, module.bits)
    return None


def _group_size(network: nn.Module, asked: int | None) -> int:
    rows = {p: m.weight.shape[-1] for p, m in network.named_modules() if _is_packed(p, m)}
    for size in _AT_LOAD if asked is None else (asked,):
        other = next((path for path, length in rows.items() if length % size), None)
        if other is None:
            return size
    way = "leave out --drafter-bits" if asked is None else "choose a smaller group_size"
    raise DFlashError(
        f"the drafter's {other} has rows of {rows[other]} numbers, which groups of {size} do not "
        "divide",
        way,
    )


def _is_packed(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and not any(kept in path for kept in KEPT)
