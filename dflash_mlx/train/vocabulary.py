"""The draft vocabulary: the tokens that training scores, the most frequent of the answers."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.dflash.block_model import capped
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainee import Trainee


class DraftVocabulary:
    """A part of the vocabulary, and the target's output head for it, in float32.

    tokens: [V'] ids, the most frequent in the answers first. index: [V], where in `tokens` each id
    is, -1 if nowhere. head: [V', d], or [V', d + 1] where the target's head has a bias. softcap:
    of the logits, or None.
    """

    def __init__(self, trainee: Trainee, texts: Texts, size: int | None) -> None:
        """size: as for `draft_size`."""
        config = trainee.config
        answers = np.concatenate([s.tokens[s.prompt_length :] for s in texts.sequences])
        counts = Counter(answers.tolist())
        chosen = sorted(range(config.vocab_size), key=lambda token: (-counts[token], token))
        self.tokens = np.array(chosen[: draft_size(size, config.vocab_size)])
        self.index = np.full(config.vocab_size, -1)
        self.index[self.tokens] = np.arange(len(self.tokens))
        head, width = trainee.target.head(), config.hidden_size
        bias = head(mx.zeros((1, width)))
        weights = head(mx.eye(width)) - bias
        parts = [weights, bias] if mx.any(bias != 0).item() else [weights]
        rows = mx.concatenate(parts).T[mx.array(self.tokens)]
        self.head = mx.contiguous(rows.astype(mx.float32))
        self.softcap = config.final_logit_softcapping
        self._multiplier = config.output_multiplier
        self._covered = float((self.index[answers] >= 0).mean())
        mx.eval(self.head)

    def describe(self) -> str:
        """One line for people."""
        return f"the draft vocabulary covers {self._covered:.1%} of the answers"

    def head_inputs(self, states: mx.array) -> mx.array:
        """What `head` takes, [N, d] or [N, d + 1], from final states [N, d]."""
        rows = states * self._multiplier
        if self.head.shape[1] == rows.shape[1]:
            return rows
        return mx.concatenate([rows, mx.ones((rows.shape[0], 1))], axis=-1)

    def logits(self, states: mx.array) -> mx.array:
        """[N, V'] from final states [N, d]."""
        return capped(self.head_inputs(states) @ self.head.T, self.softcap)


def draft_size(size: int | None, vocab_size: int) -> int:
    """V': `size` of `vocab_size` tokens; None for a quarter."""
    return min(size or max(1, vocab_size // 4), vocab_size)
