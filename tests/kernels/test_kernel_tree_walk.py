"""tree_walk: the kernel in the emulator and its reference against the loop of acceptance."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import emulated
from kernels_metal.tree_walk import TREE_WALK, tree_walk, tree_walk_reference
from support.kernels import each_is_found, random_calls, refused

TWINS = [1] * 71, [0] + [1] * 70, [-1] + [0] * 70  # equal siblings across lanes: the first counts
CHAIN = [7] * 1000, [7] * 1000, list(range(-1, 999))


def walk(choices, tokens, parents) -> list[int]:
    """Count, next anchor, path and padding, one node at a time."""
    path = [0]
    while True:
        here = path[-1]
        below = [i for i, p in enumerate(parents) if p == here and tokens[i] == choices[here]]
        if not below:
            return [len(path), choices[here], *path, *[-1] * (len(parents) - len(path))]
        path.append(below[0])


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32], ids=str)
def test_kernel_and_reference_follow_the_loop(dtype):
    trees, lengths = [map(mx.array, tree) for tree in (TWINS, CHAIN)], set()
    for choices, tokens, parents in (*trees, *random_calls(TREE_WALK)):
        arrays = choices.astype(dtype), tokens.astype(dtype), parents
        with emulated():
            result = tree_walk(*arrays)
        assert result.dtype == mx.int32
        wanted = walk(*(array.tolist() for array in arrays))
        assert result.tolist() == tree_walk_reference(*arrays).tolist() == wanted
        lengths.add(wanted[0])
    assert {1, 2, 3, 1000} < lengths


def test_what_it_refuses():
    three, two, many = (mx.zeros(n, mx.int32) for n in (3, 2, 1025))
    with refused(r"shape of tokens is \[2\], but must be \[3\]"):
        tree_walk(three, two, three)
    with refused("dtype of parents is int64, but must be int32 or uint32"):
        tree_walk(three, three, three.astype(mx.int64))
    with refused("number of nodes is 1025, but must be 1 to 1024"):
        tree_walk(many, many, many)


def walking():
    deepest = max(
        random_calls(TREE_WALK), key=lambda arrays: tree_walk_reference(*arrays)[0].item()
    )
    wanted = walk(*(array.tolist() for array in deepest))
    return [(np.array(tree_walk(*deepest)), np.array(wanted))]


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("tree_walk", walking, {
        "every lane writes the root": ("if (lane == 0) {\n  result[2]",
            "if (true) {\n  result[2]", "race"),
        "one node too many": ("i < nodes; i += 32) {\n    if",
            "i <= nodes; i += 32) {\n    if", "bounds"),
        "the end of the path is never filled": ("int i = length + lane",
            "int i = length + lane + 1", "unwritten"),
        "a child of any parent": ("parents[i] == node && tokens", "tokens", "result"),
    }),
)
# fmt: on
