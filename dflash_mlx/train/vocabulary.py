"""The draft vocabulary: the tokens that training scores, the most frequent of the answers."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.target.model import Target
from dflash_mlx.train.blocks import Array
from dflash_mlx.train.data import Texts


class DraftVocabulary:
    """A part of the vocabulary, and the target's output head for it, in float32.

    tokens: [V'] ids, the most frequent in the answers first. index: [V], where in `tokens` each id
    is, -1 if nowhere. head: [V', d], or [V', d + 1] where the target's head has a bias. softcap:
    of the logits, or None.
    """

    def __init__(
        self, target: Target, config: NetworkConfig, texts: Texts, size: int | None
    ) -> None:
        """size: as for `draft_size`."""
        size = draft_size(size, config.vocab_size)
        self.tokens = _most_frequent(texts, size, config.vocab_size)
        self.index = np.full(config.vocab_size, -1)
        self.index[self.tokens] = np.arange(len(self.tokens))
        self.head = _head_rows(target, config.hidden_size, self.tokens)
        self.softcap = config.final_logit_softcapping
        self._multiplier = config.output_multiplier
        mx.eval(self.head)

    def covers(self, texts: Texts) -> float:
        """Share of the answers' tokens that are in it."""
        answers = np.concatenate([s.tokens[s.prompt_length :] for s in texts.sequences])
        return float((self.index[answers] >= 0).mean())

    def describe(self, texts: Texts) -> str:
        """One line for people."""
        return f"the draft vocabulary covers {self.covers(texts):.1%} of the answers"

    def head_inputs(self, states: mx.array) -> mx.array:
        """What `head` takes, [N, d] or [N, d + 1], from final states [N, d]."""
        rows = states * self._multiplier
        if self.head.shape[1] == rows.shape[1]:
            return rows
        return mx.concatenate([rows, mx.ones((rows.shape[0], 1))], axis=-1)

    def logits(self, states: mx.array) -> mx.array:
        """[N, V'] from final states [N, d]."""
        logits = self.head_inputs(states) @ self.head.T
        return logits if self.softcap is None else mx.tanh(logits / self.softcap) * self.softcap


def draft_size(size: int | None, vocab_size: int) -> int:
    """V': `size` of `vocab_size` tokens; None for a quarter."""
    return min(size or max(1, vocab_size // 4), vocab_size)


def _most_frequent(texts: Texts, size: int, vocab_size: int) -> Array:
    counts: Counter[int] = Counter()
    for sequence in texts.sequences:
        counts.update(sequence.tokens[sequence.prompt_length :].tolist())
    chosen = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    others = [token for token in range(vocab_size) if token not in counts]
    return np.array(chosen + others[: size - len(chosen)])


def _head_rows(target: Target, width: int, tokens: Array) -> mx.array:
    """[V', d] weights of the target's head for these tokens; [V', d + 1] where it has a bias."""
    head = target.head()
    bias = head(mx.zeros((1, width)))
    weights = head(mx.eye(width)) - bias
    parts = [weights, bias] if mx.any(bias != 0).item() else [weights]
    rows = mx.concatenate(parts).T[mx.array(tokens)]
    return mx.contiguous(rows.astype(mx.float32))
