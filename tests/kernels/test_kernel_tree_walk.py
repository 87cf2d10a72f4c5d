"""The tree_walk kernel in the emulator against its reference."""

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.emulator import emulated
from kernels_metal.tree_walk import tree_walk, tree_walk_reference
from support import kernel_cases as cases

NODES = (*range(1, 18), 23, 31, 32, 33, 34, 47, 63, 64, 65, 80, 95, 96, 97, 128, 200, 1024)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32], ids=cases.name)
@pytest.mark.parametrize("deep", [False, True], ids=["bushy", "deep"])
def test_tree_walk_equals_its_reference(deep, dtype):
    rng = np.random.default_rng(1)
    lengths = set()
    with emulated():
        for nodes in NODES:
            choices, tokens, parents = cases.random_tree(rng, nodes, deep)
            arrays = (
                mx.array(choices, dtype=dtype),
                mx.array(tokens, dtype=dtype),
                mx.array(parents),
            )
            result = tree_walk(*arrays)
            assert result.dtype == mx.int32
            assert result.tolist() == tree_walk_reference(*arrays).tolist()
            lengths.add(result[0].item())
    assert min(lengths) == 1
    assert max(lengths) > (20 if deep else 3)


def test_a_path_may_end_at_a_leaf_at_an_inner_node_and_at_the_root():
    trees = {
        (3, 9, 0, 1, 2, -1): ([1, 2, 9, 0], [5, 1, 2, 9], [-1, 0, 1, 0]),
        (2, 8, 0, 1, -1, -1): ([1, 8, 9, 0], [5, 1, 2, 9], [-1, 0, 1, 0]),
        (1, 7, 0, -1, -1, -1): ([7, 8, 9, 0], [5, 1, 2, 9], [-1, 0, 1, 0]),
    }
    with emulated():
        for result, tree in trees.items():
            assert tuple(tree_walk(*map(mx.array, tree)).tolist()) == result


def test_of_equal_siblings_the_first_counts_also_across_lanes():
    parents = [-1] + [0] * 70
    tokens = [0] + [1] * 70
    with emulated():
        result = tree_walk(mx.array([1] * 71), mx.array(tokens), mx.array(parents))
    assert result[:4].tolist() == [2, 1, 0, 1]
