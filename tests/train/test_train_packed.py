"""Many blocks in one pass have the hidden states that each has alone, and see nothing else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.target.cache import LayerCache
from dflash_mlx.target.sequence import SequenceCache
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

    def states(self, **changes: Any) -> np.ndarray:
        """All hidden states in one pass; `changes` replaces features, anchors or x."""
        given = {"features": self.features, "anchors": self.anchors, "x": self.x, **changes}
        arrays = [mx.array(given[name]) for name in ("features", "anchors", "x")]
        return np.array(self.trainee.states(*arrays))

    def expected(self) -> np.ndarray:
        """Block after block, by the NumPy reference in float64."""
        result = np.empty(self.x.shape)
        for s, a in np.ndindex(self.anchors.shape):
            context = self.features[s, : self.anchors[s, a]].astype(np.float64)
            result[s, a] = reference_states(self.tensors, self.raw, self.x[s, a], context)
        return result

    def by_network(self) -> np.ndarray:
        """Block after block, as decoding drafts them: a context in caches, then one block."""
        result = np.empty_like(self.x)
        for s, a in np.ndindex(self.anchors.shape):
            cache = SequenceCache([LayerCache(w) for w in self.trainee.config.layer_windows])
            for start in range(0, self.anchors[s, a], 7):
                end = min(start + 7, self.anchors[s, a])
                self.trainee.network.append(mx.array(self.features[s, start:end]), cache)
            result[s, a] = np.array(self.trainee.network(mx.array(self.x[s, a][None]), cache)[0])
        return result


def worst(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


# Against the reference, and against decoding


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_block_has_the_hidden_states_of_the_reference_and_of_decoding(name, seed):
    packed = Packed(CONFIGS[name], seed)
    states = packed.states()
    assert worst(states, packed.expected()) < TOLERANCE
    assert worst(states, packed.by_network()) < TOLERANCE


def test_an_anchor_at_the_start_of_the_text_drafts_without_context():
    packed = Packed(CONFIGS["full"])
    packed.anchors = np.zeros((len(LENGTHS), 4), np.int64)
    assert worst(packed.states(), packed.expected()) < TOLERANCE
    nothing = np.zeros((len(LENGTHS), 0, len(TAPS) * WIDTH), np.float32)
    assert worst(packed.states(features=nothing), packed.expected()) < TOLERANCE


# What a block sees


def changed(array: np.ndarray, where: Any) -> np.ndarray:
    result = array.copy()
    result[where] += 1.0
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_sees_no_other_block_and_no_feature_from_its_anchor_on(name):
    packed = Packed(CONFIGS[name])
    before = packed.states()
    for s, a in np.ndindex(packed.anchors.shape):
        features = changed(packed.features, np.s_[s, packed.anchors[s, a] :])
        others = np.ones(packed.anchors.shape, bool)
        others[s, a] = False
        after = packed.states(features=features, x=changed(packed.x, others))
        assert np.array_equal(after[s, a], before[s, a])
        assert worst(after[others], before[others]) > 1e-2
