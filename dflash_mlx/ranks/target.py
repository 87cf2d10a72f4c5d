"""One model on several ranks: the first leads, the others do with their parts what it does.

Drafts, budgets, clocks, samplers and rules are the leader's alone. What it does with the model (a
pass, and what becomes of caches between passes) is told to the followers in order, so that ranks
cannot drift apart, whatever it was decided by. The sums over ranks are in the model's own layers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.ranks import is_lost
from dflash_mlx.ranks.group import END, Found, Ranks
from dflash_mlx.verifier.block import Block, Saved
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.sequence import Rows, SequenceCache
from kernels_metal.dispatch import Mode

# What is done with a cache between passes; followers do it with theirs.
_REPEATED = ("commit", "lengthen", "discard", "mark", "mark_chunk", "rewind")


class LedCache(SequenceCache):
    """A cache whose counterparts on other ranks do what it does."""

    def __init__(self, cache: SequenceCache, leader: Leader, number: int) -> None:
        super().__init__(cache.layers, cache.parts)
        self.leader, self.number = leader, number

    def fork(self) -> LedCache:
        return self.leader.lead(super().fork(), "fork", self.number)

    def saved(self) -> Saved:
        raise RuntimeError("its keys and values are on several machines")

    def restore(self, saved: Saved) -> None:
        raise RuntimeError("its keys and values are on several machines")


def _repeated(name: str) -> Callable[..., Any]:
    own = getattr(SequenceCache, name)

    def both(self: LedCache, *given: Any) -> Any:
        found = own(self, *given)
        plain = ([*map(int, g)] if isinstance(g, Iterable) else int(g) for g in given)
        self.leader.note(name, self.number, *plain)
        return found

    return both


for _name in _REPEATED:
    setattr(LedCache, _name, _repeated(_name))


class Leader(Target):
    """A target of which the first rank has its part, and whose passes all ranks compute."""

    def __init__(self, model: Any, context_length: int, name: str, ranks: Ranks) -> None:
        self.ranks, self._numbers = ranks, count()
        # Orders travel with the next pass; a cache may go on another thread.
        self._waiting: deque[tuple[Any, ...]] = deque()
        super().__init__(model, context_length, name)

    def note(self, *order: Any) -> None:
        """Something that the followers have to do, too, before the next pass."""
        self._waiting.append(order)

    def lead(self, cache: SequenceCache, *how: Any) -> LedCache:
        """`cache` as one of which all ranks have a part. how: the followers come by theirs."""
        led = LedCache(cache, self, next(self._numbers))
        self.note(*how, led.number)
        weakref.finalize(led, self.note, "drop", led.number).atexit = False
        return led

    def new_cache(self) -> LedCache:
        return self.lead(super().new_cache(), "new")

    def use_kernels(self, mode: Mode) -> None:
        super().use_kernels(mode)
        self.note("use_kernels", mode)

    def widen(self, dtype: mx.Dtype) -> None:
        super().widen(dtype)
        self.note("widen", str(dtype).rpartition(".")[2])

    def forward(
        self,
        tokens: mx.array,
        cache: SequenceCache,
        block: Block,
        aux_layers: tuple[int, ...] = (),
        embeddings: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        assert embeddings is None  # pictures are not sent to the others
        prepare = super().forward
        rows = [Rows(tokens, cache, block)]
        (found,) = self._on_all(rows, lambda: [prepare(tokens, cache, block, aux_layers)])
        return found

    def _together(self, sequences: Sequence[Rows], aux_layers: tuple[int, ...]) -> Found:
        prepare = super()._together
        return self._on_all(sequences, lambda: prepare(sequences, aux_layers))

    def _on_all(self, sequences: Sequence[Rows], prepare: Callable[[], Found]) -> Found:
        """A pass on all ranks, behind all that waits; waits for the tokens."""
        rows = [_as_json(each) for each in sequences]

        def orders() -> list[tuple[Any, ...]]:
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            return [*waiting, ("pass", rows)]

        return self.ranks.run_pass(orders, prepare)


def _as_json(rows: Rows) -> list[Any]:
    assert isinstance(rows.cache, LedCache)
    block = rows.block
    parents = None if block.tree is None else block.tree.parents
    about = [block.rows, parents, block.branches, block.before]
    return [rows.cache.number, rows.tokens.tolist(), about]


class Follower:
    """Does with its part of a target what the leader does."""

    def __init__(self, target: Target, ranks: Ranks) -> None:
        self.target, self.ranks = target, ranks
        self.caches: dict[int, SequenceCache] = {}  # by the leader's numbers

    def replay(self) -> None:
        """Go on until the leader ends; raises what goes wrong here and not on the leader."""
        while True:
            for name, *given in self.ranks.share():
                if name == END:
                    return
                self._do(name, *given)

    def _do(self, name: str, *given: Any) -> None:
        if name == "pass":
            self._pass(*given)
        elif name in _REPEATED:
            number, *more = given
            getattr(self.caches[number], name)(*more)
            if name in ("commit", "rewind"):  # which nobody asks for here; no sum is left in it
                mx.async_eval(self.caches[number].arrays)
        elif name == "new":
            self.caches[given[0]] = self.target.new_cache()
        elif name == "fork":
            self.caches[given[1]] = self.caches[given[0]].fork()
        elif name == "drop":
            del self.caches[given[0]]
        elif name == "use_kernels":
            self.target.use_kernels(given[0])
        elif name == "widen":
            self.target.widen(getattr(mx, given[0]))
        else:
            raise ValueError(f"there is no order {name!r}")

    def _pass(self, sequences: list[Any]) -> None:
        """This rank's part of a pass; what it says is the leader's to ask."""
        try:
            found = self.ranks.agree(lambda: self._prepare(sequences))
        except Exception as error:
            if is_lost(error):
                raise
            return  # it failed on the leader, too, who says so
        mx.eval([logits for logits, _ in found])

    def _prepare(self, sequences: list[Any]) -> Found:
        rows = [self._rows(*each) for each in sequences]
        if len(rows) == 1:
            return [self.target.forward(*rows[0][:3])]
        return self.target._together(rows, ())

    def _rows(self, number: int, tokens: list[int], about: list[Any]) -> Rows:
        rows, parents, branches, before = about
        tree = None if parents is None else Tree((0,) * (len(parents) - 1), tuple(parents))
        block = Block(rows, tree, branches, last_only=True, before=before)
        return Rows(mx.array(tokens), self.caches[number], block)
