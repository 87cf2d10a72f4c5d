"""Many blocks in one pass have the hidden states that each has alone, and see nothing else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from support.reference_dflash import hidden_states as reference_states
from support.reference_dflash import random_drafter
from support.tiny_training import TAPS, WIDTH, drafter_config, make_trainee, sliding

TOLERANCE = 1e-4
LENGTHS = (21, 30, 13)  # of the sequences; features behind the ends are padding
BLOCK = 8

CONFIGS = {
    "full": drafter_config(),
    "full and causal": drafter_config(is_causal=True),
    "sliding": drafter_config(**sliding("SS", 12)),
    "shorter than the block": drafter_config(**sliding("SS", 3)),
    "shorter, not causal": drafter_config(**sliding("SS", 3), is_causal=False),
    "sliding over one position": drafter_config(**sliding("SS", 1)),
    "mixed": drafter_config(**sliding("SFS", 6), num_key_value_heads=1),
    "a key for every head": drafter_config(num_key_value_heads=4, rope_theta=500.0),
}


class Packed:
    """Random blocks of three sequences: anchors [S, A] and embeddings x [S, A, B, d]."""

    def __init__(self, raw: dict[str, Any], seed: int = 0, blocks: int = 4) -> None:
        self.raw, self.tensors = raw, random_drafter(raw)
        self.trainee = make_trainee(raw)
        rng = np.random.default_rng(seed)
        noise = rng.normal(size=(len(LENGTHS), max(LENGTHS), len(TAPS) * WIDTH))
        self.features = noise.astype(np.float32)
        drawn = [rng.choice(length, size=blocks, replace=False) for length in LENGTHS]
        self.anchors = np.stack(drawn)
        shape = (*self.anchors.shape, BLOCK, WIDTH)
        self.x = rng.normal(size=shape).astype(np.float32)

    def states(self) -> np.ndarray:
        """All hidden states in one pass."""
        return np.array(self.trainee.states(*map(mx.array, (self.features, self.anchors, self.x))))

    def expected(self) -> np.ndarray:
        """Block after block, by the NumPy reference in float64."""
        result = np.empty(self.x.shape)
        for s, a in np.ndindex(self.anchors.shape):
            context = self.features[s, : self.anchors[s, a]].astype(np.float64)
            result[s, a] = reference_states(self.tensors, self.raw, self.x[s, a], context)
        return result


def worst(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_block_has_the_hidden_states_that_the_reference_gives_it_alone(name, seed):
    packed = Packed(CONFIGS[name], seed)
    assert worst(packed.states(), packed.expected()) < TOLERANCE


def test_an_anchor_at_the_start_of_the_text_drafts_without_context():
    packed = Packed(CONFIGS["full"])
    packed.anchors = np.zeros((len(LENGTHS), 4), np.int64)
    assert worst(packed.states(), packed.expected()) < TOLERANCE
    packed.features = packed.features[:, :0]
    assert worst(packed.states(), packed.expected()) < TOLERANCE
