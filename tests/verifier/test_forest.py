"""One pass over the rows of several sequences is what a pass over each alone is."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import Rows
from support.families import FAMILIES, VOCAB_SIZE, make_model
from support.hybrids import fresh, target_of
from support.overrides import override
from support.recurrent_families import RECURRENT

TURNS = (  # they compute attention themselves, or with one position for all rows
    "deepseek_v3", "gemma2", "gemma4_text_shared_kv", "internlm3_dynamic_rope", "ministral3",
    "llama4_text", "plamo2", "kimi_linear", "bailing_hybrid", "afm7",
)  # fmt: skip
TREE = Tree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 1, 2))
TAPS = (0, 2)


def sequences(target: Target) -> list[Rows]:
    """A tree behind 7 tokens, one row behind 40, a chain behind 3, and 9 rows of a prompt."""
    rng, found = np.random.default_rng(0), []
    tree = Block.of(TREE if target.takes_trees else Tree.chain(range(5, 10)))
    for before, block in (
        (7, tree),
        (40, Block(1)),
        (3, Block(9)),
        (0, Block(9, last_only=True)),
    ):
        cache = fresh(target, rng.integers(VOCAB_SIZE, size=before).tolist())
        found.append(Rows(mx.array(rng.integers(VOCAB_SIZE, size=block.rows)), cache, block))
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_rows_see_their_own_sequence_alone(family):
    target = target_of(family)
    target.tap(TAPS)
    expected = [target.forward(*rows[:3], TAPS) for rows in sequences(target)]
    together = sequences(target)
    found = target.forward_all(together, TAPS)
    for (logits, features), (own, tapped) in zip(found, expected, strict=True):
        assert logits.shape == own.shape
        for one, other in ((logits, own), (features, tapped)):  # some families' states are large
            np.testing.assert_allclose(
                one, other, atol=max(1e-4, 1e-6 * float(mx.abs(other).max()))
            )
    for rows in together:  # and what is kept of it serves the next pass
        rows.cache.commit([0, 2] if rows.block.tree is not None else [0])
    assert target.joins == (family not in TURNS)


def test_a_model_that_changes_masks_takes_turns():
    target = Target(make_model("llama"), 128, "llama")
    call = type(target.model.layers[0].self_attn).__call__

    def masked(self, x, mask=None, cache=None):
        return call(self, x, mask if mask is None or isinstance(mask, str) else mask[None], cache)

    override(
        target.model.layers[0].self_attn, lambda module, forward, *given: masked(module, *given)
    )
    assert not target.joins
