"""Prefix trees, and the path through one that follows the target's choices."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.core.tree import Tree, accept
from support.decoding import path_to, tree_of

#      0
#    1   2
#   3 4   5
#         6
BRANCHES = tree_of([10, 11, 12, 13, 14, 15, 16], [-1, 0, 0, 1, 1, 2, 5])

parent_lists = st.lists(st.integers(0, 30), max_size=30).map(
    lambda numbers: [-1, *(n % (i + 1) for i, n in enumerate(numbers))]
)


def test_depths_tokens_and_children_follow_the_parents():
    chain = Tree.chain([8, 9])
    assert (chain.parents, chain.depths, chain.is_chain) == ((-1, 0, 1), (0, 1, 2), True)
    assert BRANCHES.depths == (0, 1, 1, 2, 2, 2, 3) and not BRANCHES.is_chain
    assert BRANCHES.drafted == (11, 12, 13, 14, 15, 16)
    assert [node for node in range(7) if BRANCHES.has_children(node)] == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("node", "token", "child"), [(0, 12, 2), (1, 14, 4), (1, 15, None), (6, 1, None), (0, 10, None)]
)
def test_a_child_is_found_by_its_token(node, token, child):
    assert BRANCHES.child(node, token) == child


@given(parent_lists)
def test_ancestors_are_exactly_the_nodes_on_the_path(parents):
    tree = tree_of(range(len(parents)), parents)
    for node in range(len(tree)):
        on_path = np.zeros(len(tree), dtype=bool)
        on_path[path_to(tree, node)] = True
        assert (tree.ancestors[node] == on_path).all()
        assert tree.depths[node] == on_path.sum() - 1


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([], []), ([], [0]), ([2], [-1, 1]), ([2], [-1, -1]), ([2], [-1]), ([], [-1, 0])],
)
def test_parents_that_make_no_tree_are_refused(tokens, parents):
    with pytest.raises(ValueError, match="not a tree"):
        Tree(tuple(tokens), tuple(parents))


def test_a_merged_chain_shares_what_the_tree_has_already():
    tree = Tree((1, 2), (-1, 0, 0), (0.0, -1.0, -2.0), ("", "first", "first"))
    grown = tree.merge([2, 5, 6], [-1.5, -3.0, -3.0], "lookup")
    assert grown.drafted == (1, 2, 5, 6)
    assert grown.parents == (-1, 0, 0, 2, 3)
    assert grown.logprobs == (0.0, -1.0, -1.5, -3.0, -3.0)
    assert grown.sources == ("", "first", "lookup", "lookup", "lookup")
    root = Tree.chain()
    assert root.merge([4, 5], [-1.0, -1.0], "lookup").parents == (-1, 0, 1)
    assert root.merge([], [], "lookup").drafted == ()


def test_ids_go_to_the_device_behind_the_anchor_whether_they_are_known_yet_or_not():
    anchor = mx.array([9])
    assert Tree.chain().ids(anchor) is anchor
    assert BRANCHES.ids(anchor).tolist() == [9, 11, 12, 13, 14, 15, 16]
    pending = Tree.chain(mx.array([4, 5]))
    assert pending.ids(anchor).tolist() == [9, 4, 5]
    assert pending.drafted == (4, 5) and pending.child(1, 5) == 2


def test_a_pruned_tree_keeps_its_tokens_parents_and_confidences():
    tree = Tree((1, 2, 3), (-1, 0, 0, 2), (0.0, -1.0, -2.0, -3.0))
    smaller = tree.prune([0, 2, 3])
    assert smaller.drafted == (2, 3)
    assert smaller.parents == (-1, 0, 1)
    assert smaller.logprobs == (0.0, -2.0, -3.0)
    assert tree.prune(range(4)) is tree


# Acceptance

CHAIN = tree_of([1, 2, 3, 4], [-1, 0, 1, 2])
#      0:1
#   1:2   2:3
# 3:5  4:6   5:5
TREE = tree_of([1, 2, 3, 5, 6, 5], [-1, 0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("tree", "choices", "path", "tokens"),
    [
        (CHAIN, [2, 3, 8, 9], (0, 1, 2), (2, 3, 8)),
        (tree_of([1], [-1]), [7], (0,), (7,)),
        (TREE, [2, 6, 0, 0, 4, 0], (0, 1, 4), (2, 6, 4)),
        (TREE, [3, 6, 5, 0, 4, 8], (0, 2, 5), (3, 5, 8)),
        (TREE, [3, 6, 6, 0, 4, 8], (0, 2), (3, 6)),
        (TREE, [1, 0, 0, 0, 0, 0], (0,), (1,)),
    ],
)
def test_the_path_follows_the_targets_choices_and_ends_with_its_own_token(
    tree, choices, path, tokens
):
    accepted = accept(tree, lambda nodes: choices[nodes[-1]])
    assert accepted.path == path
    assert accepted.tokens == tokens
    assert accepted.next_anchor.tolist() == [tokens[-1]]


def test_the_token_after_a_leaf_is_not_read():
    class Unread:
        def item(self) -> int:
            raise AssertionError("the token was read")

    token, pending = Unread(), mx.argmax(mx.array([[0.0, 2.0, 1.0]]), axis=-1)
    assert accept(tree_of([1], [-1]), lambda path: token).token is token
    accepted = accept(tree_of([1], [-1]), lambda path: pending)
    assert accepted.next_anchor.tolist() == [1] and accepted.tokens == (1,)
    with pytest.raises(AssertionError, match="was read"):
        accept(CHAIN, lambda path: token)
