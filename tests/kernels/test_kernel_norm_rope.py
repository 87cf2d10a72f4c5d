"""norm_rope: the kernel in the emulator and its reference against NumPy in double precision."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.checks import FLOATS
from kernels_metal.emulator import emulated
from kernels_metal.norm_rope import (
    HEAD_DIMS,
    NORM_ROPE,
    HeadNorm,
    norm_rope,
    norm_rope_reference,
    padded,
)
from support.kernels import arguments, assert_close, bytes_read, each_is_found, exact, refused


def turned(x: mx.array, positions: mx.array, weight: mx.array, norm: HeadNorm) -> np.ndarray:
    """[1, heads, R, D]: normed, weighted and turned head by head."""
    half = weight.size // 2
    heads = exact(x)[0].reshape(x.shape[1], -1, weight.size)
    mean = (heads**2).mean(axis=-1, keepdims=True)
    a, b = np.split(heads / np.sqrt(mean + norm.epsilon) * exact(weight), [half], axis=-1)
    angles = np.array(positions)[:, None, None] / exact(norm.periods)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, a * s + b * c], axis=-1).swapaxes(0, 1)[None]


def wanted(queries, keys, positions, norm: HeadNorm) -> list[np.ndarray]:
    weights = norm.query_weight, norm.key_weight
    pairs = zip((queries, keys), weights, strict=True)
    return [turned(x, positions, weight, norm) for x, weight in pairs]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("together", [0, 1])
def test_kernel_and_reference_norm_and_turn_every_head_as_numpy_does(dim, together, dtype):
    given = arguments(NORM_ROPE, dtype, dim=dim, rows=3, heads=4, together=together, first=50)
    assert given[0].shape == (1, 3, 4 * dim)
    with emulated():
        ours = norm_rope(*given)
    for kernel, reference, right in zip(
        ours, norm_rope_reference(*given), wanted(*given), strict=True
    ):
        assert_close(kernel, right, dtype)
        assert mx.abs(reference - kernel).max().item() <= {4: 1e-4, 2: 0.04}[dtype.size]


def test_rows_of_a_tree_have_positions_of_their_own():
    queries, keys, _, norm = arguments(NORM_ROPE, rows=5)
    positions = mx.array([7, 8, 8, 9, 8])
    with emulated():
        ours = norm_rope(queries, keys, positions, norm)
    for kernel, right in zip(ours, wanted(queries, keys, positions, norm), strict=True):
        assert_close(kernel, right)


def test_everything_is_read_and_written_once_but_the_weights_once_for_each_head():
    given = arguments(NORM_ROPE, mx.float16, rows=8, dim=128, heads=8, kv_heads=2, together=1)
    with emulated() as run:
        norm_rope(*given)
    for name, array in zip(("queries", "keys"), given, strict=False):
        assert bytes_read(run, "norm_rope", name) == array.nbytes
        out = run.counters[0].buffers[f"turned_{name}"]
        assert out.written == out.size == array.nbytes
    assert bytes_read(run, "norm_rope", "query_weight") == 8 * 8 * 128 * 2


def test_few_positions_are_padded_and_many_are_not():
    assert padded(mx.array([3, 4])).tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    nine = mx.arange(9)
    assert padded(nine) is nine


def test_what_it_refuses():
    queries, keys, positions, norm = arguments(NORM_ROPE, mx.float16)
    with refused(r"the shape of keys is \[1, 7, 256\], but must be \[1, 8, any\]"):
        norm_rope(queries, keys[:, :7], positions, norm)
    with refused("the columns of queries is 1000, but must be a multiple of 128"):
        norm_rope(queries[..., :1000], keys, positions, norm)
    with refused("dtype of query_weight is float32, but must be float16"):
        weight = norm.query_weight.astype(mx.float32)
        norm_rope(queries, keys, positions, norm._replace(query_weight=weight))
    with refused("the head dim is 72"):
        norm_rope(queries, keys, positions, norm._replace(query_weight=mx.zeros(72)))
    with refused("rows of queries is 97, but must be 1 to 96"):
        norm_rope(mx.zeros((1, 97, 128)), mx.zeros((1, 97, 128)), mx.arange(97), norm)
    with refused("dtype of positions is float32"):
        norm_rope(queries, keys, positions.astype(mx.float32), norm)


def turning():
    given = arguments(NORM_ROPE, rows=3, dim=80, heads=2, kv_heads=1, together=1, first=9)
    return list(zip(map(exact, norm_rope(*given)), wanted(*given), strict=True))


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("norm_rope", turning, {
        "rows as if nothing stood between them": ("row * queries_strides[1]",
            "row * HEADS * D", "bounds or result"),
        "keys are read as queries": ("? queries + row * queries_strides[1] : keys",
            "? queries + row * queries_strides[1] : queries", "result"),
        "heads of keys are counted with the queries'": ("(is_query ? 0 : HEADS)", "0",
            "bounds or race"),
        "only the first lanes add up": ("rsqrt(simd_sum(squares)",
            "rsqrt((lane < 16 ? simd_sum(squares) : 0.0f)", "divergence"),
        "a pair behind the last": ("if (at < HALF) {\n    const", "if (at <= HALF) {\n    const",
            "bounds or race or result"),
        "the lane's second pair is left out": ("(HALF + 31) / 32", "HALF / 32", "unwritten"),
        "the norm is that of half a head": ("squares += pairs[i][0] * pairs[i][0] + ",
            "squares += ", "result"),
        "no weight": (" * float(weight[at])", "", "result"),
        "turned backwards": ("a * c - b * s", "a * c + b * s", "result"),
        "every row at the first's position": ("positions[row]", "positions[0]", "result"),
        "an epsilon of its own": ("+ epsilon[0]", "+ 1.0f", "result"),
    }),
)
# fmt: on
