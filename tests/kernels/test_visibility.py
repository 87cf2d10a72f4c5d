"""What each row of an attention sees: its mask, its bits, and what is refused."""

import numpy as np
import pytest

from kernels_metal.visibility import Visibility
from support.kernels import refused


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


@pytest.mark.parametrize(
    ("local", "first", "message"),
    [
        (np.ones((2, 2), np.int32), None, r"local is int32 \[2, 2\], but must be bool \[R, N\]"),
        (np.ones(3, bool), None, r"local is bool \[3\], but must be bool \[R, N\]"),
        (np.ones((2, 2), bool), (0,), "length of first is 1, but must be 2"),
        (np.ones((2, 2), bool), (0, 11), r"first\[1\] is 11, but must be 0 to 10"),
        (np.zeros((2, 2), bool), (0, 10), r"local\[1\] is all False, .* nothing"),
    ],
)
def test_visibility_refuses(local, first, message):
    with refused(message):
        Visibility(10, local, first)
