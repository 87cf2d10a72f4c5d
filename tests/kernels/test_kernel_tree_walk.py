"""tree_walk: the kernel in the emulator and its reference against the loop of acceptance."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import emulated
from kernels_metal.tree_walk import tree_walk, tree_walk_reference
from support.kernels import each_is_found, faults, refused

NODES = (*range(1, 18), 23, 31, 32, 33, 34, 47, 63, 64, 65, 80, 95, 96, 97, 128, 200, 1024)
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


def random_tree(rng: np.random.Generator, nodes: int, deep: bool):
    """Choices, tokens and parents with many matches; `deep` makes long paths likely."""
    parents = [-1]
    parents += [
        i - 1 if deep and rng.random() < 0.9 else int(rng.integers(i)) for i in range(1, nodes)
    ]
    tokens = rng.integers(0, 3, nodes)
    choices = rng.integers(0, 3, nodes)
    for node in range(1, nodes):
        if rng.random() < (0.95 if deep else 0.5):
            choices[parents[node]] = tokens[node]
    return choices.tolist(), tokens.tolist(), parents


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32], ids=str)
@pytest.mark.parametrize("deep", [False, True], ids=["bushy", "deep"])
def test_kernel_and_reference_follow_the_loop(deep, dtype):
    rng = np.random.default_rng(1)
    trees, lengths = [random_tree(rng, nodes, deep) for nodes in NODES], set()
    for tree in [*trees, TWINS] if deep else [*trees, CHAIN]:
        arrays = mx.array(tree[0], dtype=dtype), mx.array(tree[1], dtype=dtype), mx.array(tree[2])
        with emulated():
            result = tree_walk(*arrays)
        assert result.dtype == mx.int32
        assert result.tolist() == tree_walk_reference(*arrays).tolist() == walk(*tree)
        lengths.add(result[0].item())
    assert min(lengths) == 1
    assert max(lengths) > (20 if deep else 3)


def test_what_it_refuses():
    three, two, many = (mx.zeros(n, mx.int32) for n in (3, 2, 1025))
    with refused(r"shape of tokens is \[2\], but must be \[3\]"):
        tree_walk(three, two, three)
    with refused("dtype of parents is int64, but must be int32 or uint32"):
        tree_walk(three, three, three.astype(mx.int64))
    with refused("number of nodes is 1025, but must be 1 to 1024"):
        tree_walk(many, many, many)


def walking():
    tree = random_tree(np.random.default_rng(2), 70, deep=True)
    return [(np.array(tree_walk(*map(mx.array, tree))), np.array(walk(*tree)))]


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    *faults("tree_walk", walking, {
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
