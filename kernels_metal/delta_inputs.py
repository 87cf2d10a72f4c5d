"""What a gated delta net makes of its products before the delta rule, in one launch.

Otherwise it takes a dozen: convolution, SiLU, two norms, decays, betas and copies between them;
along a tree's paths every row would be there several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from kernels_metal.checks import check, check_array, check_choice, check_range
from kernels_metal.factory import Kernel, Launch, Prepared
from kernels_metal.gated_delta import KEY_DIMS, MAX_ROWS, DeltaRows
from kernels_metal.operation import Case, Draw, Operation, case_of

EPSILON = 1e-6  # of the norms, as in mlx-lm
KERNEL = Kernel(
    "delta_inputs",
    inputs=("qkv", "a", "b", "state", "weight", "rates", "biases", "sources"),
    outputs=("q", "k", "v", "decays", "beta", "window"),
    ensure_row_contiguous=False,
)


class Mixer(NamedTuple):
    """The weights between products and rule.

    weight: [C, taps, 1], C channels of queries, keys and values, head by head. rates: [value
    heads], logarithms. biases: [value heads]. key_heads: of queries and of keys.
    """

    weight: mx.array
    rates: mx.array
    biases: mx.array
    key_heads: int

    @property
    def dim(self) -> int:
        """Numbers of a head, queries', keys' or values'."""
        return int(self.weight.shape[0]) // (2 * self.key_heads + int(self.rates.size))


Products = tuple[mx.array, mx.array, mx.array]  # qkv [1, R, C], a and b [1, R, value heads]


class DeltaInputs:
    """A call for products of this shape, settled but for the arrays."""

    def __init__(self, products: Products, mixer: Mixer) -> None:
        qkv, (channels, taps, _), dim = products[0], mixer.weight.shape, mixer.dim
        rows, heads, values = qkv.shape[1], mixer.key_heads, mixer.rates.size
        shapes = [(1, rows, each, dim) for each in (heads, heads, values)]
        gates = [(1, rows, values)] * 2
        plan = Launch(
            grid=(32, 2 * heads + values, rows),
            threadgroup=(32, 1, 1),
            output_shapes=(*shapes, *gates, (1, taps - 1 + rows, channels)),
            output_dtypes=(*[qkv.dtype] * 3, mx.float32, *[qkv.dtype] * 2),
            template=(
                *(("T", qkv.dtype), ("D", dim), ("HK", heads), ("HV", values)),
                ("TAPS", taps),
            ),
        )
        self._run = Prepared(KERNEL, plan)

    def __call__(
        self, products: Products, state: mx.array, mixer: Mixer, parents: Sequence[int]
    ) -> tuple[DeltaRows, mx.array]:
        """As `delta_inputs`."""
        order = sources(tuple(parents), mixer.weight.shape[1])
        *rows, window = self._run([*products, state, *mixer[:3], order])
        return DeltaRows(*rows), window


def delta_inputs(
    products: Products, state: mx.array, mixer: Mixer, parents: Sequence[int]
) -> tuple[DeltaRows, mx.array]:
    """The rows of the rule, and what was convolved: [1, taps - 1 + R, C].

    state: [1, taps - 1, C], what was convolved before. parents: the row before each, -1 for the
    state. Raises ValueError for other shapes and dtypes.
    """
    check_arguments(products, state, mixer, parents)
    return DeltaInputs(products, mixer)(products, state, mixer, parents)


def delta_inputs_reference(
    products: Products, state: mx.array, mixer: Mixer, parents: Sequence[int]
) -> tuple[DeltaRows, mx.array]:
    """As `delta_inputs`, by MLX's own operations, as mlx-lm writes them."""
    qkv, a, b = products
    channels, taps, _ = mixer.weight.shape
    rows, heads, dim = qkv.shape[1], mixer.key_heads, mixer.dim
    window = mx.concatenate([state, qkv], axis=1)
    if list(parents) == [*range(-1, rows - 1)]:
        found = mx.conv1d(window, mixer.weight, groups=channels)
    else:
        along = window[0][sources(tuple(parents), taps)[: rows * taps].reshape(rows, taps)]
        found = mx.conv1d(along, mixer.weight, groups=channels).swapaxes(0, 1)
    parts = mx.split(nn.silu(found), [heads * dim, 2 * heads * dim], axis=-1)
    q, k, v = (part.reshape(1, rows, -1, dim) for part in parts)
    q, k = (mx.fast.rms_norm(x, None, EPSILON / dim) for x in (q, k))
    decays = mx.exp(-mx.exp(mixer.rates.astype(mx.float32)) * nn.softplus(a + mixer.biases))
    return DeltaRows(q / dim, dim**-0.5 * k, v, decays, mx.sigmoid(b)), window


@lru_cache(256)
def sources(parents: tuple[int, ...], taps: int) -> mx.array:
    """int32 [R * taps], or 8: the rows of the window under each row's taps, in order."""
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else tuple(range(taps - 1))
        paths.append((*above[-(taps - 1) :], taps - 1 + row))
    made = [at for path in paths for at in path]
    return mx.array([*made, *[0] * (8 - len(made))])


def check_arguments(
    products: Products, state: mx.array, mixer: Mixer, parents: Sequence[int]
) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    qkv, a, b = products
    check_array("weight", mixer.weight, (None, None, 1))
    channels, taps, _ = mixer.weight.shape
    values, dtype = mixer.rates.size, (mixer.weight.dtype,)
    check_range("the taps of the convolution", taps, 2, 8)
    check_choice("the head dim", mixer.dim, KEY_DIMS)
    whole = (2 * mixer.key_heads + values) * mixer.dim
    check(channels == whole, "the channels", channels, f"{whole}, of heads of one width")
    check_array("qkv", qkv, (1, None, channels), dtype)
    check_range("the rows of qkv", qkv.shape[1], 1, MAX_ROWS)
    for name, gate in (("a", a), ("b", b)):
        check_array(name, gate, (1, qkv.shape[1], values), dtype)
    check_array("state", state, (1, taps - 1, channels), dtype)
    for name, each in (("rates", mixer.rates), ("biases", mixer.biases)):
        check_array(name, each, (values,))
    known = len(parents) == qkv.shape[1] and all(-1 <= p < row for row, p in enumerate(parents))
    check(known, "parents", list(parents), f"{qkv.shape[1]} earlier rows or -1")


def _case(products: Products, state: mx.array, mixer: Mixer, *_: Any) -> Case:
    shape = (mixer.key_heads, mixer.rates.size, mixer.dim, mixer.weight.shape[1])
    return case_of(products[0].shape[1], shape, [products[0], mixer.rates])


def _compared(out: tuple[DeltaRows, mx.array], *_: Any) -> list[mx.array]:
    """Decays to what mlx-lm computes them from, where the kernel rounds nothing."""
    (*others, decays, beta), window = out
    return [*others, decays.astype(beta.dtype), beta, window]


def _after(out: tuple[DeltaRows, mx.array], products: Products, *rest: Any) -> tuple[Any, ...]:
    (q, *_), _ = out
    return (mx.minimum(products[0], q[:, :, 0, :1]), *products[1:]), *rest


def _arguments(draw: Draw) -> tuple[Any, ...]:
    """Products side by side, as one product gives them."""
    rows, dim = draw.size("rows", (1, 2, 5, 8, 31, 32)), draw.size("dim", KEY_DIMS)
    heads, taps = draw.size("heads", (1, 2)), draw.size("taps", (2, 4))
    values = heads * draw.size("shared", (1, 2, 3))
    widths = (2 * heads + values) * dim, values, values
    whole = draw.normal(1, rows, sum(widths))
    products = mx.split(whole, [widths[0], widths[0] + values], axis=-1)
    weight, state = draw.normal(widths[0], taps, 1), draw.normal(1, taps - 1, widths[0])
    rates, biases = draw.normal(values).astype(mx.float32), draw.normal(values)
    return tuple(products), state, Mixer(weight, rates, biases, heads), draw.parents(rows)


def _tried(products: Products, state: mx.array, mixer: Mixer, *_: Any) -> Any:
    shared, taps = mixer.rates.size // mixer.key_heads, mixer.weight.shape[1]
    sizes = {"heads": mixer.key_heads, "shared": shared, "dim": mixer.dim, "taps": taps}
    words = f"{mixer.key_heads} and {mixer.rates.size} heads of {mixer.dim}, {taps} taps"
    return words, [{**sizes, "rows": 8}]


DELTA_INPUTS = Operation(
    name="delta_inputs",
    kernel=delta_inputs,
    reference=delta_inputs_reference,
    check=check_arguments,
    case=_case,
    kernels=(KERNEL,),
    arguments=_arguments,
    defaults={"rows": 8, "heads": 2, "shared": 2, "dim": 128, "taps": 4},
    compared=_compared,
    after=_after,
    tried=_tried,
    variants=[{"dim": dim} for dim in KEY_DIMS],
)
