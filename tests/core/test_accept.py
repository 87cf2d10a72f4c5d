import mlx.core as mx
import pytest

from dflash_mlx.core.accept import accept
from support.decoding import tree_of

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
