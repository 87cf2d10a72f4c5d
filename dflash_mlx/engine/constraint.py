"""What an answer's grammar allows behind any of its tokens, and sampling under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import MOST_ROWS
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Tree

FORCED = "forced"  # the source of tokens that the grammar leaves no choice of


class Constraint:
    """The grammar of one answer.

    Everything that it says is a function of the sequence's tokens. The matcher goes back to what
    they share with those that it saw last, and on from there; so trees, rounds and dropped caches
    need no bookkeeping.
    """

    def __init__(self, matcher: Any, start: int, drafts: bool = True) -> None:
        self._matcher = matcher  # an LLMatcher of llguidance
        self._start = start  # tokens of the prompt
        self._drafts = drafts  # tokens that the grammar leaves no choice of
        self._at: list[int] = []  # tokens of the answer that the matcher has taken in

    def forced_tokens(self, history: Sequence[int]) -> list[int]:
        """The tokens that have to follow `history`, up to the first that can be chosen."""
        taken = self._go_to(self._answer(history))
        return list(self._matcher.compute_ff_tokens()) if taken else []

    def forced_tree(self, history: Sequence[int], most: int) -> Tree | None:
        """The forced tokens behind `history` as a chain of at most `most` drafts, None for none.

        A token that ends the answer is no draft, since nothing is asked for behind it.
        """
        forced = self.forced_tokens(history) if self._drafts else []
        if not forced:
            return None
        self._go_to([*self._answer(history), *forced])
        drafts = forced[:-1] if self._matcher.is_stopped() else forced
        tokens = drafts[: min(most, MOST_ROWS - 1)]
        return Tree.chain().merge(tokens, [0.0] * len(tokens), FORCED)

    def mask(self, history: Sequence[int], size: int) -> npt.NDArray[np.bool_] | None:
        """[size] which tokens may follow; None behind tokens that the grammar forbids.

        Behind the end of the answer this is the end token.
        """
        if not self._go_to(self._answer(history)):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        found = np.unpackbits(bits, bitorder="little")[:size].astype(np.bool_)
        if not found.any():
            raise self._broken("no token of the model can follow")
        return np.pad(found, (0, size - len(found)))

    def nodes(self, tree: Tree, history: Sequence[int]) -> list[int]:
        """The nodes of a tree behind `history` whose paths are allowed, in order."""
        kept, behind = [0], {0: self._answer(history)}
        for node in _depth_first(tree):  # neighbours share most of their paths
            parent, token = tree.parents[node], tree.drafted[node - 1]
            if parent in behind and self._allows(behind[parent], token):
                behind[node] = [*behind[parent], token]
                kept.append(node)
        return sorted(kept)

    def run(self, history: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow, one after the other."""
        taken = self._go_to(self._answer(history))
        return int(self._matcher.validate_tokens(list(tokens))) if taken else 0

    def end(self, accepted: Accepted, history: Sequence[int]) -> Accepted:
        """What is accepted behind `history`, cut where the answer is over."""
        said = self._answer(history)
        for k, token in enumerate(accepted.tokens):
            said.append(token)
            self._go_to(said)
            if self._matcher.is_stopped():
                return replace(accepted, path=accepted.path[: k + 1], token=token, ends=True)
        return accepted

    def _answer(self, history: Sequence[int]) -> list[int]:
        return list(history[self._start :])

    def _allows(self, answer: list[int], token: int) -> bool:
        return self._go_to(answer) and self._matcher.validate_tokens([token]) == 1

    def _go_to(self, answer: list[int]) -> bool:
        """Bring the matcher behind these tokens; whether the grammar takes them all.

        What stands behind the end of the answer is not looked at.
        """
        at = self._at
        shared = min(len(answer), len(at))
        if at[:shared] != answer[:shared]:
            pairs = zip(at, answer, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if shared < len(at):
            self._matcher.rollback(len(at) - shared)
            del at[shared:]
        for token in answer[shared:]:
            if self._matcher.is_stopped():
                return True
            if not self._matcher.try_consume_tokens([token]):
                self._check()
                return False
            at.append(token)
        self._check()
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise self._broken(self._matcher.get_error().partition("\n")[0])

    def _broken(self, why: str) -> DFlashError:
        what = f"the grammar gave up {len(self._at)} tokens into the answer ({why})"
        return DFlashError(what, "make it simpler")


class MaskedSampler(Sampler):
    """Draws tokens that a constraint allows: the mask first, then all that `Sampler` does."""

    def __init__(self, sampler: Sampler, constraint: Constraint) -> None:
        super().__init__(sampler.config)
        self._constraint = constraint

    @property
    def needs_history(self) -> bool:
        return True

    def adjusted(self, logits: mx.array, history: Sequence[int]) -> mx.array:
        """Logits [V] with forbidden tokens at -inf, then as `Sampler` has them."""
        mask = self._constraint.mask(history, logits.shape[-1])
        if mask is not None:
            logits = mx.where(mx.array(mask), logits, -mx.inf)
        return super().adjusted(logits, history)

    def known(self, history: Sequence[int], best: Callable[[], int]) -> int | None:
        """What is forced; greedily the best token of all, where that is allowed."""
        if forced := self._constraint.forced_tokens(history):
            return forced[0]
        greedy = self.config.temperature == 0 and self.config.repetition_penalty == 1
        return token if greedy and self._constraint.run(history, [token := best()]) else None


def _depth_first(tree: Tree) -> list[int]:
    """Nodes 1..N-1, every one behind its parent and before the parent's next child."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    order, left = [], [0]
    while left:
        node = left.pop()
        order.append(node)
        left += reversed(children.get(node, []))
    return order[1:]
