"""Which blocks a step trains on: random anchors in the answers, all or where rounds begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_WINDOW = 16  # steps whose sequences are sorted by length among themselves


@dataclass(frozen=True)
class TextTokens:
    """A training sequence, and what the target prefers after each of its tokens."""

    tokens: Array  # [L]
    prompt_length: int
    likely: Array  # [L, K], the most likely next tokens, greedy choice first
    shares: Array  # [L, K], their probabilities

    @property
    def anchors(self) -> Array:
        """Positions that can open a block: the prompt's last token and later."""
        return np.arange(self.prompt_length - 1, len(self.tokens) - 1)


@dataclass(frozen=True)
class Blocks:
    """A blocks of each of S sequences."""

    rows: Array  # [S], which sequences
    anchors: Array  # [S, A]
    tokens: Array  # [S, A, B], the true ones, 0 where the text has ended
    prefixes: Array  # [S, A], how many drafts after the anchor are visible
    likely: Array  # [S, A, B, K], what the target finds likeliest there, greedy choice first
    shares: Array  # [S, A, B, K], their probabilities
    # [S, A, B], where these are known: up to and with the first choice not followed by the text.
    supervised: Array
    revealed: Array | None = None  # [S, A, B], tokens that are visible besides

    @property
    def labels(self) -> Array:
        """[S, A, B], what to draft: the greedy choices, true until a text was sampled otherwise."""
        return self.likely[..., 0]

    def inputs(self, mask_token: int) -> Array:
        """[S, A, B]: anchor and visible prefix, then mask tokens."""
        visible = np.arange(self.tokens.shape[-1]) <= self.prefixes[..., None]
        visible = visible if self.revealed is None else visible | self.revealed
        return np.where(visible, self.tokens, mask_token)


@dataclass
class BlockSampler:
    """Blocks of a step, a function of (seed, step) alone, so that a resumed run sees the same.

    An epoch splits each sequence's anchors, shuffled, into groups of A (the last one filled up with
    repeats), shuffles the groups and takes S of them a step, of texts of like length.
    """

    texts: Sequence[TextTokens]
    block_size: int
    shape: tuple[int, int]  # S and A
    seed: int
    # beta of the law Pr(l = j) ~ beta^j of visible prefixes, j = least_prefix .. B - 2 (D2SD, arXiv
    # 2606.04446); None for DFlash, whose prefixes are 0.
    prefix_base: float | None = None
    short_share: float = 0.0  # of the steps, whose blocks are half as long
    # Of the blocks, which show each of their tokens with a probability 1 - t, t ~ U(0, 1).
    reveal_share: float = 0.0
    least_prefix: int = 0

    def __post_init__(self) -> None:
        self._sequences, self._anchors = self.shape
        self._counts = [self._count_groups(text) for text in self.texts]
        self._groups = np.repeat(np.arange(len(self.texts)), self._counts)
        self.steps_per_epoch = -(-len(self._groups) // self._sequences)
        self._epoch = -1

    def blocks(self, step: int) -> Blocks:
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        chosen = np.arange(within * self._sequences, (within + 1) * self._sequences)
        chosen = self._order[chosen % len(self._order)]
        anchors = self._anchor_groups[chosen]
        rng = np.random.default_rng([self.seed, step, 1])
        short = rng.random() < self.short_share
        size = max(2, self.block_size // 2) if short else self.block_size
        prefixes = np.zeros(anchors.shape, np.int64)
        if self.prefix_base is not None:
            lengths = np.arange(min(self.least_prefix, size - 2), size - 1)
            law = self.prefix_base**lengths
            prefixes = rng.choice(lengths, size=anchors.shape, p=law / law.sum())
        blocks = cut_blocks(self.texts, self._groups[chosen], anchors, size, prefixes)
        return self._reveal(blocks, rng) if self.reveal_share else blocks

    def _reveal(self, blocks: Blocks, rng: np.random.Generator) -> Blocks:
        shape = *blocks.anchors.shape, 1
        masked = np.where(rng.random(shape) < self.reveal_share, rng.random(shape), 1.0)
        ends = np.array([len(self.texts[row].tokens) for row in blocks.rows])[:, None, None]
        inside = blocks.anchors[..., None] + np.arange(blocks.tokens.shape[-1]) < ends
        revealed = inside & (rng.random(blocks.tokens.shape) >= masked)
        return replace(blocks, revealed=revealed, supervised=blocks.supervised & ~revealed)

    def _shuffle(self, epoch: int) -> None:
        rng = np.random.default_rng([self.seed, epoch, 0])
        parts = []
        for text, groups in zip(self.texts, self._counts, strict=True):
            wanted = groups * self._anchors
            chosen = self._choose(text, wanted, rng)[:wanted]
            parts += [chosen, rng.choice(chosen, wanted - len(chosen))]
        self._anchor_groups = np.concatenate(parts).reshape(-1, self._anchors)
        self._order = self._by_length(rng.permutation(len(self._groups)), rng)
        self._epoch = epoch

    def _count_groups(self, text: TextTokens) -> int:
        return -(-len(text.anchors) // self._anchors)

    def _choose(self, text: TextTokens, wanted: int, rng: np.random.Generator) -> Array:
        return rng.permutation(text.anchors)

    def _by_length(self, order: Array, rng: np.random.Generator) -> Array:
        """`order` with steps of like length: less of a step is padding."""
        lengths = np.array([len(text.tokens) for text in self.texts])[self._groups]
        order, rest = np.split(order, [len(order) // self._sequences * self._sequences])
        windows = np.arange(len(order)) // (_WINDOW * self._sequences)
        steps = order[np.lexsort((lengths[order], windows))].reshape(-1, self._sequences)
        return np.concatenate([rng.permutation(steps).reshape(-1), rest])


class RoundStartSampler(BlockSampler):
    """Takes an anchor as often as rounds of decoding begin there, by `start_chances`.

    Of a text an epoch has as many as whole groups come next to their sum, one group at least.
    """

    def _count_groups(self, text: TextTokens) -> int:
        return max(1, round(float(start_chances(text).sum()) / self._anchors))

    def _choose(self, text: TextTokens, wanted: int, rng: np.random.Generator) -> Array:
        chances = start_chances(text)
        order = rng.permutation(len(chances))
        shares = np.minimum(chances[order] * (wanted / chances.sum()), 1.0)
        # Systematic sampling: one anchor wherever the running sum passes a whole number.
        marks = np.floor(np.cumsum(shares) + rng.random())
        return text.anchors[order][np.diff(marks, prepend=0.0) > 0]


SAMPLERS = {"even": BlockSampler, "starts": RoundStartSampler}  # by the law of their anchors


def start_chances(text: TextTokens) -> Array:
    """[anchors of `text`] how often about a round begins there, by the target's own surprise.

    0.22 + 0.6 (1 - p), with p the probability that the target gave the token there, 0 where it is
    not among the likeliest; measured in docs/training.md. A round always begins at the first.
    """
    before = text.anchors - 1
    same = text.likely[before] == text.tokens[text.anchors][:, None]
    p = np.clip((text.shares[before] * same).sum(axis=-1), 0.0, 1.0)
    chances: Array = 0.22 + 0.6 * (1.0 - p)
    chances[0] = 1.0
    return chances


def cut_blocks(
    texts: Sequence[TextTokens], rows: Array, anchors: Array, block_size: int, prefixes: Array
) -> Blocks:
    """The blocks that begin at `anchors` [S, A] of the texts `rows` [S]."""
    positions = anchors[..., None] + np.arange(block_size)
    tokens, inside = np.zeros(positions.shape, np.int64), np.zeros(positions.shape, bool)
    wide = (*positions.shape, texts[0].likely.shape[-1])
    likely, shares = np.zeros(wide, np.int64), np.zeros(wide, np.float32)
    for i, row in enumerate(rows):
        text, at = texts[row], positions[i]
        last = len(text.tokens) - 1
        inside[i] = at <= last
        tokens[i] = np.where(inside[i], text.tokens[np.minimum(at, last)], 0)
        before = np.clip(at - 1, 0, last)
        likely[i], shares[i] = text.likely[before], text.shares[before]
    behind = np.arange(block_size) > prefixes[..., None]
    followed = inside & (~behind | (tokens == likely[..., 0]))  # goes on as a greedy text
    reached = np.cumprod(followed, axis=-1).astype(bool)
    reached = np.concatenate([inside[..., :1], reached[..., :-1]], axis=-1)
    return Blocks(rows, anchors, tokens, prefixes, likely, shares, behind & inside & reached)
