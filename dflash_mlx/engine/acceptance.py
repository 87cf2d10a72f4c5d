"""How a verdict becomes accepted tokens: the acceptance rules, chosen once per answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from dflash_mlx.core.accept import Accepted, accept
from dflash_mlx.core.sampling import KEEP, Sampler
from dflash_mlx.core.tree import rows_on
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict


class AcceptanceRule(Protocol):
    """Decides which nodes of a verified tree to keep; the caches stay as they are."""

    remembers: bool  # has caches of its own, which reading the tokens again does not give back
    needs_history: bool  # asks for the tokens before a node, so no round can run ahead of another

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """The accepted path and the target's token after it."""


class TargetSampling:
    """Take the target's token at a node, follow the child that carries it (see `accept`)."""

    remembers = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.needs_history = sampler.needs_history

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """Exact for any tree and any sampler; one seed gives one answer whatever was drafted."""
        walked = verdict.greedy_walk() if self._sampler.is_argmax else None
        return walked or accept(verdict.tree, verdict.choices(self._sampler, state))


class RejectionSampling:
    """Rejection sampling of chains that know what they were drawn from; other trees are matched.

    Exact (arXiv 2211.17192), with p of the target and q of the draft: every token follows p. A
    draft is kept with probability sum min(p, q), one that is a best guess d and is matched with
    p(d).
    """

    remembers = False

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.needs_history = sampler.needs_history
        self._match = TargetSampling(sampler)

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """Keep drafts up to the first that is rejected; then one token from p or what is left."""
        q, drafted = verdict.proposal.q, len(verdict.tree) - 1
        if q is None or drafted == 0:
            return self._match.accept(verdict, state)
        position = state.next_position
        p = self._laws(verdict, state)
        keys = [self._sampler.key(position + k, KEEP) for k in range(drafted)]
        u = mx.stack([mx.random.uniform(key=key) for key in keys])
        k = int(kept(p[:-1], q, verdict.ids[1:], u).item())  # type: ignore[arg-type]
        law = p[k] if k == drafted else remainder(p[k], q[k])
        token = mx.random.categorical(mx.log(law)[None], key=self._sampler.key(position + k))
        return Accepted(verdict.tree, tuple(range(k + 1)), token)

    def _laws(self, verdict: Verdict, state: State) -> mx.array:
        """P [N, V] after every node of the chain."""
        if not self._sampler.needs_history:
            return self._sampler.law(verdict.logits, [])
        tokens = [*state.tokens, *verdict.tree.drafted]
        first = len(state.tokens)
        rows = range(verdict.logits.shape[0])
        laws = [self._sampler.law(verdict.logits[k], tokens[: first + k]) for k in rows]
        return mx.stack(laws)


class KeepLogits:
    """Another rule, whose tokens carry the logits that they were chosen from."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self._rule = rule
        self.remembers, self.needs_history = rule.remembers, rule.needs_history

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """As the other rule; nothing is computed or waited for."""
        accepted = self._rule.accept(verdict, state)
        return replace(accepted, logits=verdict.logits[rows_on(accepted.path)])


def kept(p: mx.array, q: mx.array, tokens: mx.array, u: mx.array) -> mx.array:
    """How many drafted tokens are kept: all before the first that is rejected; [] int.

    A token is kept with probability min(1, p/q). p, q: [n, V], the laws at each of n drafted
    positions. tokens: [n], drawn from q. u: [n], uniform in [0, 1).
    """
    at = tokens[:, None]
    of_p, of_q = (mx.take_along_axis(law, at, axis=-1)[:, 0] for law in (p, q))
    return mx.cumprod((u * of_q < of_p).astype(mx.int32)).sum()


def remainder(p: mx.array, q: mx.array) -> mx.array:
    """The law [V] of the token in place of one that was not kept: max(0, p - q), normalised."""
    rest = mx.maximum(p - q, 0)
    total = rest.sum()
    return mx.where(total > 0, rest / total, p)  # nothing is left only where rounding says so
