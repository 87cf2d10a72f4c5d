"""What the target says of a tree, and how that becomes accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from dflash_mlx.core.sampling import KEEP, Sampler
from dflash_mlx.core.tree import Accepted, Choose, Tree, accept
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State


@dataclass(frozen=True)
class Verdict:
    """What the target says of a proposed tree's N nodes."""

    proposal: Proposal
    ids: mx.array  # [N] their tokens
    logits: mx.array  # [N, V] for the token after each node
    shared: bool = False  # whether rows of other sequences were in the pass

    @property
    def is_plain(self) -> bool:
        """Whether the pass was one of plain decoding: over the root, and nothing else."""
        return len(self.tree) == 1 and not self.shared

    @property
    def tree(self) -> Tree:
        return self.proposal.tree

    @cached_property
    def argmax(self) -> mx.array:
        """[N] the greedy choice after each node."""
        return mx.argmax(self.logits, axis=-1)

    @cached_property
    def greedy(self) -> Any:
        return self.argmax.tolist()

    def choices(self, sampler: Sampler, state: State) -> Choose:
        """The target's token after a path. Starts the pass; only drafts to compare make it wait."""
        mx.async_eval(self.argmax if sampler.is_argmax else self.logits)
        if not sampler.is_argmax:
            return self._sampled(sampler, state)
        if len(self.tree) == 1:
            return lambda path: self.argmax
        return lambda path: self.greedy[path[-1]]

    def _sampled(self, sampler: Sampler, state: State) -> Choose:
        before = state.tokens if sampler.needs_history else []
        position = state.next_position
        if len(self.tree) > 1:
            mx.eval(self.logits)

        def choose(path: tuple[int, ...]) -> int | mx.array:
            drafts = [self.tree.drafted[node - 1] for node in path[1:]]
            history = [*before, *drafts]
            token = sampler.known(history, lambda: self.greedy[path[-1]])
            if token is not None:
                return token
            return sampler.sample(self.logits[path[-1]], position + len(drafts), history)

        return choose


class TargetSampling:
    """The acceptance rule: take the target's token at a node, follow the child that carries it."""

    remembers = False  # has caches of its own, which reading the tokens again does not give back

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.needs_history = sampler.needs_history  # so no round can run ahead of another

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """Exact for any tree and any sampler; one seed gives one answer whatever was drafted."""
        return accept(verdict.tree, verdict.choices(self.sampler, state))


class RejectionSampling(TargetSampling):
    """Rejection sampling of chains that know what they were drawn from; other trees are matched.

    Exact (arXiv 2211.17192), with p of the target and q of the draft: every token follows p. A
    draft is kept with probability sum min(p, q), one that is a best guess d and is matched with
    p(d).
    """

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """Keep drafts up to the first that is rejected; then one token from p or what is left."""
        q, drafted = verdict.proposal.q, len(verdict.tree) - 1
        if q is None or drafted == 0:
            return super().accept(verdict, state)
        position = state.next_position
        p = self._laws(verdict, state)
        keys = [self.sampler.key(position + k, KEEP) for k in range(drafted)]
        u = mx.stack([mx.random.uniform(key=key) for key in keys])
        k = int(kept(p[:-1], q, verdict.ids[1:], u).item())  # type: ignore[arg-type]
        law = p[k] if k == drafted else remainder(p[k], q[k])
        token = mx.random.categorical(mx.log(law)[None], key=self.sampler.key(position + k))
        return Accepted(verdict.tree, tuple(range(k + 1)), token)

    def _laws(self, verdict: Verdict, state: State) -> mx.array:
        """P [N, V] after every node of the chain."""
        if not self.sampler.needs_history:
            return self.sampler.law(verdict.logits, [])
        tokens = [*state.tokens, *verdict.tree.drafted]
        first = len(state.tokens)
        rows = range(verdict.logits.shape[0])
        laws = [self.sampler.law(verdict.logits[k], tokens[: first + k]) for k in rows]
        return mx.stack(laws)


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
