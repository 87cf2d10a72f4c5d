"""Bad arguments are refused by name, value and limit, before anything is launched."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import factory
from kernels_metal.cache_commit import accepted_rows
from kernels_metal.cascade_attention import Visibility, cascade_attention
from kernels_metal.draft_head import draft_head
from kernels_metal.tree_walk import tree_walk
from kernels_metal.verify_qmm import Packing, verify_qmm
from support import kernel_cases as cases


@pytest.fixture(params=["executor", "reference"], autouse=True)
def nothing_is_launched(request):
    """Refused alike where a kernel could run and where none can."""

    def refuse(kernel, inputs, plan):
        raise AssertionError(f"{kernel.name} was launched")

    if request.param == "reference":
        yield
        return
    with factory.executing(refuse):
        yield


def attention(
    dim=64, heads=4, kv_heads=2, rows=5, slots=25, prefix=20, dtype=mx.float32, **changed
):
    local = np.tri(changed.pop("mask_rows", rows), changed.pop("columns", rows), dtype=bool)
    arrays = {
        "queries": mx.zeros((1, heads, rows, dim), dtype),
        "keys": mx.zeros((1, kv_heads, slots, dim), dtype),
        "values": mx.zeros((1, kv_heads, slots, dim), dtype),
        "sinks": None,
    } | changed
    queries, keys, values, sinks = arrays.values()
    return cascade_attention(queries, keys, values, Visibility(prefix, local), 0.1, sinks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 72}, "head dim of queries is 72, but must be one of 64, 80, 96, 128, 256"),
        ({"rows": 97, "slots": 200}, "rows of local is 97, but must be 1 to 96"),
        ({"mask_rows": 4}, "rows of local is 4, but must be 5, those of queries"),
        ({"columns": 6}, "20 keys of prefix and 6 local, but must be up to 25 slots"),
        ({"prefix": 21}, "21 keys of prefix and 5 local, but must be up to 25 slots"),
        ({"prefix": -1}, "prefix is -1, but must be 0 or more"),
        ({"columns": 1025, "slots": 2000}, "columns of local is 1025, but must be 1 to 1024"),
        ({"heads": 3}, "heads of queries is 3, but must be a multiple of the 2 of keys"),
        (
            {"dtype": mx.int32},
            "queries is int32, but must be float32 or float16 or bfloat16",
        ),
        ({"keys": mx.zeros((1, 2, 25, 64), mx.float16)}, "dtype of keys is float16, .* float32"),
        ({"values": mx.zeros((1, 2, 24, 64))}, r"of values is \[1, 2, 24, 64\], .* 25, 64\]"),
        (
            {"keys": mx.zeros((2, 25, 64))},
            r"of keys is \[2, 25, 64\], but .* \[1, any, any, 64",
        ),
        ({"sinks": mx.zeros(3)}, r"shape of sinks is \[3\], but must be \[4\]"),
    ],
)
def test_attention_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        attention(**changes)


@pytest.mark.parametrize(
    ("local", "first", "message"),
    [
        (np.ones((2, 2), np.int32), None, r"local is int32 \[2, 2\], but must be bool \[R, N\]"),
        (np.ones(3, bool), None, r"local is bool \[3\], but must be bool \[R, N\]"),
        (np.ones((2, 2), bool), (0,), "length of first is 1, but must be 2"),
        (np.ones((2, 2), bool), (0, 11), r"first\[1\] is 11, but must be 0 to 10"),
        (
            np.eye(2, dtype=bool)[[0, 0]] & False,
            (0, 10),
            r"local\[1\] is all False, .* nothing",
        ),
    ],
)
def test_visibility_refuses(local, first, message):
    with pytest.raises(ValueError, match=message):
        Visibility(10, local, first)


@pytest.mark.parametrize(
    ("shape", "k", "dtype", "message"),
    [
        ((2, 50), 17, mx.float32, "k is 17, but must be 1 to 16"),
        ((2, 50), 0, mx.float32, "k is 0, but must be 1 to 16"),
        ((2, 5), 6, mx.float32, "k is 6, but must be up to the 5 columns of logits"),
        ((1025, 5), 2, mx.float32, "rows of logits is 1025, but must be 1 to 1024"),
        ((1, 2, 50), 2, mx.float32, r"shape of logits is \[1, 2, 50\], but must be \[any, any\]"),
        ((2, 50), 2, mx.int32, "dtype of logits is int32, but must be float32"),
    ],
)
def test_the_draft_head_refuses(shape, k, dtype, message):
    with pytest.raises(ValueError, match=message):
        draft_head(mx.zeros(shape, dtype), k)


def test_the_tree_walk_refuses():
    three, two = mx.zeros(3, mx.int32), mx.zeros(2, mx.int32)
    with pytest.raises(ValueError, match=r"shape of tokens is \[2\], but must be \[3\]"):
        tree_walk(three, two, three)
    with pytest.raises(ValueError, match="dtype of parents is int64, but must be int32 or uint32"):
        tree_walk(three, three, three.astype(mx.int64))
    many = mx.zeros(1025, mx.int32)
    with pytest.raises(ValueError, match="number of nodes is 1025, but must be 1 to 1024"):
        tree_walk(many, many, many)


@pytest.mark.parametrize(
    ("path", "first", "message"),
    [
        ([], [0, 0], r"path is \[\], but must be one or more increasing rows"),
        ([2, 2], [0, 0], r"path is \[2, 2\], but must be one or more increasing rows"),
        ([-1, 2], [0, 0], r"path is \[-1, 2\], but must be one or more increasing rows"),
        ([0, 2], [0], "length of first is 1, but must be 2"),
        ([0, 2], [0, 8], r"first\[1\] is 8, but must be 0 to 7, for row 2 to be inside 10 slots"),
    ],
)
def test_the_commit_refuses(path, first, message):
    caches = [mx.zeros((1, 2, 10, 4))] * 2
    with pytest.raises(ValueError, match=message):
        accepted_rows(caches, path, first)


def test_the_commit_refuses_caches_of_different_types():
    caches = [mx.zeros((1, 2, 10, 4)), mx.zeros((1, 2, 10, 4), mx.float16)]
    with pytest.raises(ValueError, match=r"dtype of caches\[1\] is float16, but must be float32"):
        accepted_rows(caches, [1], [0, 0])
    with pytest.raises(ValueError, match="number of caches is 0, but must be 1 or more"):
        accepted_rows([], [1], [])


def product(rows=4, depth=128, columns=6, bits=4, group=32, **changed):
    packing = Packing(bits, group)
    made = cases.quantised(np.random.default_rng(0), rows, depth, columns, mx.float32, packing)
    arguments = dict(zip(("x", "weights", "scales", "biases"), made, strict=False)) | changed
    return verify_qmm(*arguments.values(), packing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 33}, "rows of x is 33, but must be 1 to 32"),
        ({"bits": 3}, "bits is 3, but must be one of 4, 8"),
        ({"group": 16}, "group is 16, but must be one of 32, 64, 128"),
        ({"x": mx.zeros((4, 100))}, "columns of x is 100, but must be a multiple of 32"),
        ({"x": mx.zeros((4, 160))}, r"shape of weights is \[6, 16\], but must be \[any, 20\]"),
        ({"x": mx.zeros((4, 128), mx.float16)}, "dtype of scales is float32, but must be float16"),
        ({"weights": mx.zeros((6, 16), mx.int32)}, "dtype of weights is int32, but must be uint32"),
        ({"biases": mx.zeros((6, 5))}, r"shape of biases is \[6, 5\], but must be \[6, 4\]"),
        (
            {"weights": mx.zeros((16, 6), mx.uint32).T},
            r"weights with strides is \(4, 24\), but must be contiguous",
        ),
        (
            {"scales": mx.zeros((6, 8))[:, ::2]},
            r"scales with strides is \(32, 8\), but must be contiguous",
        ),
    ],
)
def test_the_quantised_product_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        product(**changes)
