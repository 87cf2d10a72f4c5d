"""Drafter networks whose matrices are stored in 4 or 8 bits, in MLX's own packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from dflash_mlx.errors import DFlashError

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
KEPT = "candidate_selector"  # small, and what it adds decides between near candidates


@dataclass(frozen=True)
class Quantization:
    """How matrices are packed; names as in the config.json of MLX folders."""

    group_size: int
    bits: int


def quantize_network(network: nn.Module, bits: int, group_size: int = 64) -> None:
    """Pack the matrices of a drafter network in place, lazily.

    Norms, DFlash 2's base kernels and its candidate selector keep their numbers; so does what is
    packed already. bits: 4 or 8. group_size: numbers that share a scale and a bias, 32, 64 or 128.
    Raises DFlashError for other values, and where a matrix has rows of a length that the groups do
    not divide.
    """
    for name, value, allowed in (("bits", bits, BITS), ("group_size", group_size, GROUP_SIZES)):
        if value not in allowed:
            raise DFlashError(
                f"{name} of a quantised drafter is {value!r}", f"choose one of {allowed}"
            )
    for path, module in network.named_modules():
        if _is_packed(path, module) and module.weight.shape[-1] % group_size:
            raise DFlashError(
                f"the drafter's {path} has rows of {module.weight.shape[-1]} numbers, which groups "
                f"of {group_size} do not divide",
                "choose a smaller group_size, or leave the drafter as it is",
            )
    nn.quantize(network, group_size, bits, class_predicate=_is_packed)


def quantization_of(network: nn.Module) -> Quantization | None:
    """How the network's matrices are packed, None where they are not."""
    for _, module in network.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            return Quantization(module.group_size, module.bits)
    return None


def _is_packed(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and KEPT not in path
