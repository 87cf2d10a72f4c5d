"""How a verdict becomes accepted tokens: the acceptance rules, chosen once per answer."""

from __future__ import annotations

from typing import Protocol

from dflash_mlx.core.accept import Accepted, accept
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict


class Rule(Protocol):
    """Decides which nodes of a verified tree to keep; the caches stay as they are."""

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """The accepted path and the target's token after it."""


class Match:
    """Take the target's token at a node, follow the child that carries it (see `accept`)."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def accept(self, verdict: Verdict, state: State) -> Accepted:
        """Exact for any tree and any sampler; one seed gives one answer whatever was drafted."""
        walked = verdict.greedy_walk() if self._sampler.is_argmax else None
        return walked or accept(verdict.tree, verdict.choices(self._sampler, state))
