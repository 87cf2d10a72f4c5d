"""Which drafts of texts are right, without decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_mlx.train.blocks import Array, cut_blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import Trainee

ANCHORS = 16  # per text
_TEXTS = 8  # drafted for at once


def in_words(by_position: Iterable[float], by_prefix: Sequence[float]) -> str:
    """Acceptance for people: 2.260 tokens/round | by position .763 .497 ..."""
    shares = " ".join(f"{share:.3f}".lstrip("0") for share in by_position)
    told = f"{1 + by_prefix[0]:.3f} tokens/round | by position {shares}"
    lengths = " ".join(f"{length:.2f}" for length in by_prefix)
    return f"{told} | continuation by prefix {lengths}" if len(by_prefix) > 1 else told


def hits_at(
    trainee: Trainee, texts: Texts, chosen: Array, anchors: Array, prefix: int = 0
) -> Array:
    """[S, A, B - 1 - prefix] for blocks at `anchors` [S, A] of the texts `chosen` [S].

    Teacher-forced and greedy: a draft is right when it is the target's choice and all before it
    are. `prefix` true tokens are visible after the anchor. In sampled texts a draft counts as
    wrong behind the first token that is not the target's choice.
    """
    size, prefixes = trainee.config.block_size, np.full(anchors.shape, prefix)
    blocks = cut_blocks(texts.texts, chosen, anchors, size, prefixes)
    states = trainee.states(*trainee.inputs(texts, blocks))
    drafts = trainee.drafts(states[:, :, prefix + 1 :], blocks.tokens[..., prefix:-1])
    right = (drafts == blocks.labels[..., prefix + 1 :]) & blocks.supervised[..., prefix + 1 :]
    return np.cumprod(right, axis=-1)


def measure(trainee: Trainee, texts: Texts, prefix: int = 0, anchors: int = ANCHORS) -> Array:
    """[N, B - 1 - prefix] as `hits_at`, of some anchors of every text.

    They are evenly spread where the prefix leaves a token to draft.
    """
    hits: list[Array] = []
    for start in range(0, len(texts), _TEXTS):
        chosen, parts = np.arange(start, min(start + _TEXTS, len(texts))), []
        for i in chosen:
            places = texts.texts[i].anchors
            places = places[: max(1, len(places) - prefix)]
            parts.append(places[np.linspace(0, len(places) - 1, anchors).round().astype(int)])
        hits += list(hits_at(trainee, texts, chosen, np.stack(parts), prefix))
    return np.concatenate(hits)


def measure_drafts(
    trainee: Trainee, texts: Texts, variable_prefix: bool
) -> tuple[list[float], list[float]]:
    """Share of blocks whose first k drafts are all right, k = 1, 2, ...; and right drafts a block.

    The latter after every kept prefix, or after none alone.
    """
    prefixes = range(trainee.config.block_size - 1 if variable_prefix else 1)
    found = [measure(trainee, texts, prefix) for prefix in prefixes]
    return found[0].mean(axis=0).tolist(), [float(hits.sum(axis=-1).mean()) for hits in found]
