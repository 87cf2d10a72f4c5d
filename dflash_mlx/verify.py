"""One target pass over a tree, and the target's token after any of its paths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from dflash_mlx.accept import Choose
from dflash_mlx.cache import Block
from dflash_mlx.sampling import Sampler
from dflash_mlx.state import State
from dflash_mlx.target import Target
from dflash_mlx.tree import Tree


@dataclass(frozen=True)
class Verdict:
    """What the target says of a tree's N nodes.

    logits: [N, V] for the token after each node. features: [N, m*d] tapped states or None.
    """

    tree: Tree
    logits: mx.array
    features: mx.array | None

    @cached_property
    def argmax(self) -> mx.array:
        """[N] the greedy choice after each node."""
        return mx.argmax(self.logits, axis=-1)

    def choices(self, sampler: Sampler, state: State) -> Choose:
        """The target's token after a path, as `accept` asks for it.

        Starts the pass. With drafts to compare this waits for it; after a lone root it does not.
        """
        mx.async_eval(self.argmax if sampler.is_argmax else self.logits)
        if not sampler.is_argmax:
            return self._sampled(sampler, state)
        if len(self.tree) == 1:
            return lambda path: self.argmax
        greedy: list[int] = self.argmax.tolist()  # type: ignore[assignment]
        return lambda path: greedy[path[-1]]

    def _sampled(self, sampler: Sampler, state: State) -> Choose:
        """Draw at a node only when it is reached."""
        before = state.tokens if sampler.needs_history else []
        position = state.position + 1
        if len(self.tree) > 1:
            mx.eval(self.logits)

        def choose(path: tuple[int, ...]) -> mx.array:
            drafts = [self.tree.drafted[node - 1] for node in path[1:]]
            return sampler.sample(self.logits[path[-1]], position + len(drafts), [*before, *drafts])

        return choose


def verify(target: Target, state: State, tree: Tree, taps: tuple[int, ...]) -> Verdict:
    """Prepare the target's pass over all nodes of `tree` at once, behind the committed tokens.

    Nothing is evaluated yet, so that this can be done while the draft is still running.
    """
    logits, features = target.forward(tree.tokens, state.cache, Block.of(tree), taps)
    return Verdict(tree, logits, features)
