"""What a round of a hybrid launches and moves, as the script counts it."""

from __future__ import annotations

from unittest import mock

import hybrid_cost
import mlx.core as mx

HEADS, NETS = 16, 3
SHAPE = hybrid_cost.Shape("tiny", 4, HEADS)
MOVED = 2 * NETS * HEADS * 128 * 128 * 4  # bytes of states, read and written


def costs(mode: str) -> dict[str, tuple[float, float]]:
    with hybrid_cost.as_on_a_mac(), mock.patch.object(mx, "dequantize", hybrid_cost.rows_of):
        found = hybrid_cost.costs(SHAPE, mode, SHAPE.layers)
    return {name: (launches, size) for name, (launches, size) in found.items()}


def test_with_kernels_a_pass_moves_one_state_a_net_and_a_commit_of_a_chain_launches_nothing():
    on, off = costs("on"), costs("off")
    assert on["chain, commit"] == (0, 0)
    assert on["tree, commit"][1] == 0
    assert on["chain, pass"][1] == on["tree, pass"][1] == off["chain, pass"][1] == MOVED
    assert on["chain, pass"][0] == on["tree, pass"][0] < off["chain, pass"][0]
    assert off["tree, pass"][1] > 4 * MOVED and off["chain, commit"][1] == MOVED
