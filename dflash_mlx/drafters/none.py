"""Plain decoding: the drafter that drafts nothing, the control of every comparison."""

from __future__ import annotations

import sys

import mlx.core as mx

from dflash_mlx.core.config import PLAIN
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters.method import Method
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.state import Kind, State
from dflash_mlx.verifier.block import Saved


class NoContext:
    """Remembers nothing and needs nothing, so it is up to date at any length."""

    length = sys.maxsize
    arrays: list[mx.array] = []
    kind: Kind = ((), ())

    def append(self, tokens: mx.array, features: mx.array | None) -> None:
        pass

    def refill_from(self, length: int) -> int:
        return length

    def trim(self, length: int) -> None:
        pass

    def fork(self) -> NoContext:
        return self

    def saved(self) -> Saved:
        return [], None

    def restore(self, saved: Saved, tokens: mx.array) -> None:
        pass


class NoDraft(EachAlone):
    """Every tree is its root: one token per round, the target's own.

    The next root needs no decision on the host, so one round runs ahead while the host reads the
    last; without that, the device would idle while Python builds each pass.
    """

    name = PLAIN
    aux_layers: tuple[int, ...] = ()
    rounds_ahead = 1

    def new_context(self) -> NoContext:
        return NoContext()

    def draft(self, state: State, remaining: int) -> Proposal:
        return Proposal(Tree.chain())


METHOD = Method(PLAIN, "plain decoding", lambda how: NoDraft())
