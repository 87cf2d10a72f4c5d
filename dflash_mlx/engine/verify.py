"""What the target says of a tree: its token after any path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx

from dflash_mlx.core.accept import Accepted, Choose, accept
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.routing import Kernels
from kernels_metal.tree_walk import TREE_WALK


@dataclass(frozen=True)
class Verdict:
    """What the target says of a proposed tree's N nodes.

    ids: [N] their tokens. logits: [N, V] for the token after each node. features: [N, m*d] tapped
    states or None. kernels: the target's. shared: whether rows of other sequences were in the pass.
    """

    proposal: Proposal
    ids: mx.array
    logits: mx.array
    features: mx.array | None
    kernels: Kernels | None = None
    shared: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the pass was one of plain decoding: over the root, and nothing else."""
        return len(self.tree) == 1 and not self.shared

    @property
    def tree(self) -> Tree:
        """What was verified."""
        return self.proposal.tree

    @cached_property
    def argmax(self) -> mx.array:
        """[N] the greedy choice after each node."""
        return mx.argmax(self.logits, axis=-1)

    @cached_property
    def greedy(self) -> list[int]:
        """The same on the host."""
        return self.argmax.tolist()  # type: ignore[return-value]

    def choices(self, sampler: Sampler, state: State) -> Choose:
        """The target's token after a path, as `accept` asks for it.

        Starts the pass. With drafts to compare this waits for it; after a lone root it does not.
        """
        mx.async_eval(self.argmax if sampler.is_argmax else self.logits)
        if not sampler.is_argmax:
            return self._sampled(sampler, state)
        if len(self.tree) == 1:
            return lambda path: self.argmax
        return lambda path: self.greedy[path[-1]]

    def greedy_walk(self) -> Accepted | None:
        """As `accept` with the greedy choices, on the device; None where that is not faster."""
        if self.kernels is None or not self.kernels.active or len(self.tree) == 1:
            return None
        parents = mx.array(self.tree.parents)
        result = self.kernels.run(WALK, self.argmax, self.ids, parents)
        if result is None:
            return None
        length, token, *path = result.tolist()
        return Accepted(self.tree, tuple(path[:length]), token)

    def _sampled(self, sampler: Sampler, state: State) -> Choose:
        """Draw at a node only when it is reached."""
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


def _walk_on_host(choices: mx.array, tokens: mx.array, parents: mx.array) -> mx.array:
    """The loop of `accept`, as `tree_walk` is called: what the kernel has to be faster than."""
    greedy: list[int] = choices.tolist()  # type: ignore[assignment]
    above: list[int] = parents.tolist()  # type: ignore[assignment]
    drafts: list[int] = tokens[1:].tolist()  # type: ignore[assignment]
    found = accept(Tree(tuple(drafts), tuple(above)), lambda path: greedy[path[-1]])
    unused = [-1] * (len(greedy) - len(found.path))
    return mx.array([len(found.path), found.token, *found.path, *unused])


WALK = replace(TREE_WALK, reference=_walk_on_host)
