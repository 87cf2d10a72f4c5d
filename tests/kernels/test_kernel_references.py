"""The references against NumPy, and what they cost against the plain MLX expressions."""

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.tree import Tree
from dflash_mlx.target.block import Block
from dflash_mlx.target.cache import LayerCache
from kernels_metal.cache_commit import accepted_rows_reference, cache_commit
from kernels_metal.cascade_attention import Visibility, cascade_attention_reference
from kernels_metal.draft_head import draft_head_reference
from kernels_metal.tree_walk import tree_walk_reference
from kernels_metal.verify_qmm import Packing, verify_qmm_reference
from support import kernel_cases as cases


@pytest.mark.parametrize(
    "shape",
    [
        cases.Attention(64, 4, 2, 5, 33),
        cases.Attention(64, 4, 4, 1, 0, mask="all"),
        cases.Attention(80, 6, 2, 7, 20, mask="causal"),
        cases.Attention(96, 2, 1, 12, 40, window=True, sinks=True),
        cases.Attention(128, 8, 2, 9, 17, columns=40, mask="branches", start=5, slack=3),
        cases.Attention(256, 2, 2, 3, 9, sinks=True, transposed=True),
    ],
)
def test_attention_is_a_softmax_over_what_each_row_sees(shape):
    arguments = shape.arguments(mx.float32)
    cases.assert_close(cascade_attention_reference(*arguments), cases.attend(*arguments))


def test_visibility_takes_the_cheapest_mask_that_says_the_same():
    everything, causal = np.ones((3, 3), bool), np.tri(3, dtype=bool)
    assert Visibility(5, everything).mask is None
    assert Visibility(5, causal).mask == "causal"
    wider = np.tri(3, 4, dtype=bool)  # MLX would align its last column with the last row
    assert Visibility(5, wider).mask.tolist() == np.hstack([np.ones((3, 5), bool), wider]).tolist()
    windowed = Visibility(2, causal, (0, 1, 2)).mask.tolist()
    assert windowed[2] == [False, False, True, True, True]


def test_bits_hold_the_first_key_and_one_bit_for_each_local_key():
    local = np.zeros((2, 40), bool)
    local[0, [0, 5, 31]] = local[1, [32, 39]] = True
    bits = Visibility(9, local, (4, 0)).bits
    assert bits.shape == (8, 3)
    assert bits[:2].tolist() == [[4, 1 | 1 << 5 | 1 << 31, 0], [0, 0, 1 | 1 << 7]]


def test_the_mask_is_the_one_that_the_cache_makes_for_a_tree_in_a_window():
    tree = Tree.of([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2])
    cache = LayerCache(window=6)
    cache.block = Block(20)
    cache.update_and_fetch(mx.zeros((1, 1, 20, 4)), mx.zeros((1, 1, 20, 4)))
    cache.commit(range(20))
    cache.block = Block.of(tree)
    expected = cache.make_mask(5)
    prefix = expected.shape[1] - 5
    first = tuple(min(prefix, depth) for depth in tree.depths)  # counted in the view
    assert Visibility(prefix, tree.ancestors, first).mask.tolist() == expected.tolist()


def test_the_attention_reference_is_one_call_of_mlxs_attention_on_views(monkeypatch):
    """So it costs what the library's own call costs."""
    calls = []

    def spy(queries, keys, values, **keywords):
        calls.append((keys.shape, keywords["mask"]))
        return queries

    arguments = cases.Attention(64, 4, 2, 5, 33, mask="causal").arguments(mx.float16)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    cascade_attention_reference(*arguments)
    assert calls == [((1, 2, 38, 64), "causal")]


@pytest.mark.parametrize(("rows", "vocabulary", "k"), [(1, 1, 1), (3, 50, 4), (7, 999, 16)])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
def test_the_draft_head_sorts_and_normalises(rows, vocabulary, k, dtype):
    logits = cases.normal(np.random.default_rng(rows), (rows, vocabulary), dtype) * 3
    head = draft_head_reference(logits, k)
    values = cases.exact(logits)
    best = -np.sort(-values, axis=1)[:, :k]
    assert np.array_equal(np.take_along_axis(values, np.array(head.ids), axis=1), best)
    cases.assert_close(head.logsumexp[:, None], cases.log_sum_exp(logits)[:, None])
    cases.assert_close(head.logprobs, best - cases.log_sum_exp(logits)[:, None])
    assert head.tokens.tolist() == head.ids[:, 0].tolist()


@pytest.mark.parametrize("deep", [False, True])
def test_tree_walk_finds_the_path_of_the_loop(deep):
    rng = np.random.default_rng(0)
    lengths = set()
    for nodes in (1, 2, 3, 5, 8, 13, 33, 64, 96) * 4:
        tree = cases.random_tree(rng, nodes, deep)
        result = tree_walk_reference(*map(mx.array, tree)).tolist()
        assert result == cases.walk(*tree)
        lengths.add(result[0])
    assert max(lengths) > (20 if deep else 3)


def test_a_chain_is_walked_to_its_end_and_the_first_of_equal_siblings_counts():
    nodes = 1000
    chain = ([7] * nodes, [7] * nodes, list(range(-1, nodes - 1)))
    assert tree_walk_reference(*map(mx.array, chain)).tolist() == [nodes, 7, *range(nodes)]
    twins = ([5, 5, 9, 1], [0, 5, 5, 5], [-1, 0, 0, 2])
    assert tree_walk_reference(*map(mx.array, twins)).tolist() == [2, 5, 0, 1, -1, -1]


def test_committed_rows_stand_where_the_caches_own_commit_puts_them():
    rng = np.random.default_rng(1)
    keys, values = (cases.normal(rng, (1, 2, 30, 8)) for _ in "kv")
    ours, rows = [mx.array(keys), mx.array(values)], np.array(keys)[:, :, [10, 12, 13, 17]]
    assert np.array_equal(accepted_rows_reference(ours, [0, 2, 3, 7], [10, 10])[0], rows)
    cache_commit(ours, [0, 2, 3, 7], [10, 10])
    assert np.array_equal(np.array(ours[0])[:, :, 10:14], rows)

    theirs = LayerCache()
    theirs.block = Block(30)
    theirs.update_and_fetch(keys, values)
    theirs.commit(range(10))
    theirs.commit([0, 2, 3, 7])
    for mine, stored in zip(ours, theirs.arrays, strict=True):
        assert mx.array_equal(mine[:, :, :14], stored[:, :, :14])


def test_a_leading_run_of_rows_moves_nothing():
    def gather(*arguments):
        raise AssertionError("gathered")

    caches = [mx.zeros((1, 1, 4, 2))]
    cache_commit(caches, [0, 1, 2], [1], gather)
    with pytest.raises(AssertionError, match="gathered"):
        cache_commit(caches, [0, 2], [1], gather)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_quantised_product_unpacks_the_weights_as_numpy_does(bits, group, invariant):
    rng = np.random.default_rng(bits * group)
    packing = Packing(bits, group, invariant)
    arguments = cases.quantised(rng, 5, 256, 12, mx.float32, packing)
    cases.assert_close(verify_qmm_reference(*arguments), cases.multiply(*arguments))


def test_rows_of_the_invariant_reference_are_those_of_single_rows():
    x, *weights = cases.quantised(
        np.random.default_rng(3), 9, 512, 20, mx.float32, Packing(4, 64, True)
    )
    together = verify_qmm_reference(x, *weights)
    for i in range(9):
        assert mx.array_equal(together[i : i + 1], verify_qmm_reference(x[i : i + 1], *weights))
