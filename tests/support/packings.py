"""Weights in every packing that the few-row products take, and what they are by definition."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kernels_metal.verify_qmm import MODES, PACKINGS, UNPACKED, VERIFY_QMM, Packing
from support.kernels import against, arguments, exact

INTEGERS = [packing for packing in PACKINGS if packing.mode == "affine"]
FLOATS_OF = {mode: Packing(*MODES[mode][0], mode=mode) for mode in ("mxfp4", "nvfp4", "mxfp8")}
KINDS = [Packing(4, 32), Packing(6, 64), Packing(8, 32), *FLOATS_OF.values(), UNPACKED]
WAYS = ("scalar", "matrix")


def told(packing: Packing) -> str:
    return f"{packing.mode}-{packing.bits}-{packing.group}"


def sizes(rows, depth, columns, packing: Packing, **kind):
    mode = [*MODES].index(packing.mode)
    named = {"bits": packing.bits, "group": packing.group, "mode": mode}
    return {"rows": rows, "depth": depth, "columns": columns, **named, **kind}


def product(rows, depth, columns, packing: Packing, dtype=mx.float32, **kind):
    """The arguments of a product; kind: invariant, gated (with so many columns of results)."""
    return arguments(VERIFY_QMM, dtype, **sizes(rows, depth, columns, packing, **kind))


def unpacked(words, bits: int) -> np.ndarray:
    """The integers of each row of words, one after the other, the lowest bits first."""
    single = np.unpackbits(np.array(words).view(np.uint8), axis=1, bitorder="little")
    return single.reshape(len(single), -1, bits) @ 2 ** np.arange(bits)


def packed(numbers: np.ndarray, bits: int) -> mx.array:
    """Words of integers [N, K]."""
    single = (numbers[..., None] >> np.arange(bits) & 1).reshape(len(numbers), -1)
    return mx.array(np.packbits(single.astype(np.uint8), axis=1, bitorder="little").view(np.uint32))


def floating(numbers: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    """What floats of so many bits are, by the definition: a sign, an exponent, a mantissa."""
    e, m = numbers >> mantissa & 2**exponent - 1, numbers % 2**mantissa / 2**mantissa
    least = 2 - 2 ** (exponent - 1)
    size = np.where(e == 0, m * 2.0**least, (1 + m) * 2.0 ** (e + least - 1.0))
    return np.where(numbers >> exponent + mantissa == 1, -size, size)


def dequantised(weights, scales, biases, packing: Packing) -> np.ndarray:
    """Every weight by the definition of its format."""
    if packing.mode == "none":
        return exact(weights)
    q = unpacked(weights, packing.bits)
    if packing.mode == "affine":
        spread = [np.repeat(exact(a), packing.group, axis=1) for a in (scales, biases)]
        return spread[0] * q + spread[1]
    stored = np.array(scales).astype(np.int64)
    scale = floating(stored, 4, 3) if packing.mode == "nvfp4" else 2.0 ** (stored - 127)
    return floating(q, *((2, 1) if packing.bits == 4 else (4, 3))) * np.repeat(
        scale, packing.group, axis=1
    )


def small(x, *weights):
    """So that gates are not all open."""
    return x / 99, *weights


def of(packing: Packing, *shapes: tuple[int, int, int], **kind):
    """Kernel and reference at these rows, K and columns."""
    return against(VERIFY_QMM, *(sizes(*shape, packing, **kind) for shape in shapes), change=small)
