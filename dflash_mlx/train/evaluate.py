"""Acceptance length on held-out texts, position by position, before any decoding is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growth.grow import Ranked
from dflash_mlx.drafters.growth.rank import rank
from dflash_mlx.train.blocks import Array, cut_blocks
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import Trainee

ANCHORS = 16  # per text
_TEXTS = 8  # drafted for at once
_ROWS = 256  # logits ranked at once
_CHUNK = 2048  # block tokens drafted at once


@dataclass(frozen=True)
class Acceptance:
    """by_text: [blocks, B - 1 - prefix] each, 1 where this and all earlier drafts are right."""

    by_text: list[Array]

    @property
    def hits(self) -> Array:
        """[blocks, B - 1 - prefix] of all texts."""
        return np.concatenate(self.by_text)

    def of(self, chosen: Iterable[int]) -> Acceptance:
        """Of these texts alone."""
        return Acceptance([self.by_text[i] for i in chosen])

    @property
    def by_position(self) -> list[float]:
        """Share of blocks whose first k drafts are all right, k = 1, 2, ..."""
        return [float(share) for share in self.hits.mean(axis=0)]

    @property
    def tokens_per_round(self) -> float:
        """1 + the mean number of leading drafts that are right."""
        return 1 + float(self.hits.sum(axis=-1).mean())

    def describe(self) -> str:
        """One line for people."""
        return f"{self.tokens_per_round:.3f} tokens/round | by position {shares(self.by_position)}"


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
    drafts = _drafts(trainee, states[:, :, prefix + 1 :], blocks.tokens[..., prefix:-1])
    right = (drafts == blocks.labels[..., prefix + 1 :]) & blocks.supervised[..., prefix + 1 :]
    return np.cumprod(right, axis=-1)


def _drafts(trainee: Trainee, states: mx.array, before: Array) -> Array:
    """[S, A, n] tokens from final states [S, A, n, d]; before: [S, A, n], what precedes them.

    A selector goes by the true token before, as its own path does up to the first wrong draft,
    behind which nothing counts.
    """
    if trainee.config.selector is None:
        return np.array(mx.argmax(trainee.logits(states), axis=-1))
    ranked = rank_in_parts(trainee.logits, states.flatten(0, 2), trainee.config.selector.top_k)
    tokens, selector = mx.array(ranked.tokens), trainee.network.candidate_selector
    edges = selector.edges(states.flatten(0, 2), mx.array(before.reshape(-1, 1)), tokens)
    best = (ranked.logprobs + np.array(edges)[:, 0]).argmax(axis=-1)
    drafts: Array = np.take_along_axis(ranked.tokens, best[:, None], axis=-1)
    return drafts.reshape(before.shape)


def rank_in_parts(logits: Callable[[mx.array], mx.array], states: mx.array, k: int) -> Ranked:
    """The k likeliest tokens of final states [N, d]; a part of their logits at a time."""
    parts = [
        rank(logits(states[start : start + _ROWS]), k) for start in range(0, len(states), _ROWS)
    ]
    tokens = np.concatenate([part.tokens for part in parts])
    return Ranked(tokens, np.concatenate([part.logprobs for part in parts]))


def measure(trainee: Trainee, texts: Texts, prefix: int = 0) -> Acceptance:
    """Drafts at 16 anchors of every text, evenly spread where the prefix leaves one to draft."""
    hits: list[Array] = []
    for start in range(0, len(texts), _TEXTS):
        chosen, parts = np.arange(start, min(start + _TEXTS, len(texts))), []
        for i in chosen:
            anchors = texts.texts[i].anchors
            anchors = anchors[: max(1, len(anchors) - prefix)]
            parts.append(anchors[np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)])
        hits += list(hits_at(trainee, texts, chosen, np.stack(parts), prefix))
    return Acceptance(hits)


def walk(trainee: Trainee, texts: Texts) -> Acceptance:
    """The rounds of greedy decoding, each beginning where the one before ended.

    The texts must be greedy ones.
    """
    step, walked = max(1, _CHUNK // trainee.config.block_size), []
    for i, text in enumerate(texts.texts):
        anchors, chosen = text.anchors[None], np.array([i])
        parts = [anchors[:, start : start + step] for start in range(0, anchors.size, step)]
        hits = np.concatenate([hits_at(trainee, texts, chosen, part)[0] for part in parts])
        rounds, place = [], 0
        while place < len(hits):
            rounds.append(hits[place])
            place += 1 + int(hits[place].sum())
        walked.append(np.stack(rounds))
    return Acceptance(walked)


def shares(by_position: Iterable[float]) -> str:
    """Shares for people: .763 .497 ..."""
    return " ".join(f"{share:.3f}".lstrip("0") for share in by_position)
