"""Domino's head (arXiv 2605.29707): what a GRU made of the block so far corrects its logits.

Position t of a block [x_0, x_1, ...], whose anchor is x_0, tells x_{t+1}. Its GRU reads embeddings,
s_t = GRU(s_{t-1}, E[x_t]) from s_{-1} = 0, and token b gains <W_2[b], silu(W_1 [h_t; s_t])>, where
h_t is the network's final state. The first `pure_draft_prefix_len` positions gain nothing. Read
from the authors' program, SpecForge and SGLang; gates are in PyTorch's order: reset, update, new.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.drafters.dflash.paths import Candidates, Rank, behind, predecessors
from dflash_mlx.drafters.growth.grow import Linked
from kernels_metal.draft_head import MAX_K


class PrefixGRU(nn.Module):
    """One layer without biases; its parameters have PyTorch's names."""

    def __init__(self, d: int, state: int) -> None:
        super().__init__()
        self.weight_ih_l0 = mx.zeros((3 * state, d))
        self.weight_hh_l0 = mx.zeros((3 * state, state))

    def start(self) -> mx.array:
        """[G] before anything was read."""
        return mx.zeros(self.weight_hh_l0.shape[1], self.weight_hh_l0.dtype)

    def __call__(self, x: mx.array, state: mx.array) -> mx.array:
        """[..., G] after embeddings x [..., d] behind states [..., G]."""
        given = mx.split(x.astype(self.weight_ih_l0.dtype) @ self.weight_ih_l0.T, 3, axis=-1)
        kept = mx.split(state @ self.weight_hh_l0.T, 3, axis=-1)
        reset, update = (mx.sigmoid(given[i] + kept[i]) for i in (0, 1))
        new = mx.tanh(given[2] + reset * kept[2])
        return (1 - update) * new + update * state


def correction(read: int, width: int, vocabulary: int) -> list[nn.Module]:
    """W_1 and W_2, named as in files. read: numbers of [h_t; s_t]. width: between the two."""
    first = nn.Linear(read, width, bias=False)
    return [first, nn.SiLU(), nn.Linear(width, vocabulary, bias=False)]


class DominoLinks:
    """The head as `Links`. embed: tokens [...] to [..., d], as rows of a block are embedded."""

    top_k = MAX_K

    def __init__(
        self,
        gru: PrefixGRU,
        correction: list[nn.Module],
        pure: int,
        embed: Callable[[mx.array], mx.array],
    ) -> None:
        self._gru, self._correction, self._pure, self._embed = gru, correction, pure, embed

    def candidates(
        self, hidden: mx.array, logits: mx.array, shown: mx.array, ids: mx.array | None = None
    ) -> Candidates:
        """All tokens that logits are for; scores are in float32."""
        tokens = mx.arange(logits.shape[1]) if ids is None else ids
        after = self._correction[2].weight if ids is None else self._correction[2].weight[ids]
        first, start = self._first(shown), self._states(shown[:-1])[-1]

        def scores(t: int, before: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
            token = shown[-1] if state is None else tokens[before]
            state = self._gru(self._embed(token), start if state is None else state)
            found = logits[t].astype(mx.float32)
            if t >= first:
                found = found + self._narrow(hidden[t], state) @ after.T
            return found, state

        return Candidates(mx.broadcast_to(tokens, logits.shape), scores)

    def linked(
        self, hidden: mx.array, logits: mx.array, shown: mx.array, ids: mx.array | None, rank: Rank
    ) -> Linked:
        """The likeliest behind the walk that takes the best token every time.

        That walk has the law of this head, and so has what follows the first token beside it.
        Further on, what was read before the token before is taken to be the walk.
        """
        candidates = self.candidates(hidden, logits, shown, ids)
        path, scores = candidates.likeliest()
        ranked, walked = rank(scores), behind(shown[-1:], candidates.at(path))
        tokens = mx.array(ranked.tokens)
        before = mx.concatenate([predecessors(tokens, shown[-1:]), walked[:, None]], axis=1)
        states = self._states(mx.concatenate([shown[:-1], walked[:-1]]))[len(shown) - 1 :]
        edges = self._edges(hidden, mx.stack(states), before, tokens)
        counts = (mx.arange(len(hidden)) >= self._first(shown))[:, None, None]
        return Linked(ranked, np.array(mx.where(counts, edges[:, :-1] - edges[:, -1:], 0)))

    def _edges(
        self, hidden: mx.array, states: mx.array, before: mx.array, tokens: mx.array
    ) -> mx.array:
        """[n, j, k] what tokens [n, k] gain after others [n, j], behind states [n, G]."""
        read = self._gru(self._embed(before), states[:, None])
        given = mx.repeat(hidden[:, None], before.shape[1], axis=1)
        after = self._correction[2].weight[tokens].astype(mx.float32)
        found: mx.array = self._narrow(given, read) @ after.swapaxes(-1, -2)
        return found

    def _narrow(self, hidden: mx.array, states: mx.array) -> mx.array:
        """[..., E] in float32, of final states [..., d] and what was read [..., G]."""
        both = mx.concatenate([hidden.astype(states.dtype), states], axis=-1)
        first, activation, _ = self._correction
        return activation(first(both)).astype(mx.float32)  # type: ignore[no-any-return]

    def _first(self, shown: mx.array) -> int:
        """The first of the positions behind what a block shows that is corrected."""
        return max(0, self._pure - (len(shown) - 1))

    def _states(self, tokens: mx.array) -> list[mx.array]:
        """[G] before each of the tokens [n] of a block, from its anchor on, and after the last."""
        states = [self._gru.start()]
        for i in range(tokens.size):
            states.append(self._gru(self._embed(tokens[i]), states[-1]))
        return states
