"""One model on several ranks: the first leads, the others do with their parts what it does.

Drafts, budgets, clocks, samplers and rules are the leader's alone. What it does with the model (a
pass, and what becomes of caches between passes) is told to the followers in order, so that ranks
cannot drift apart, whatever it was decided by. The sums over ranks are in the model's own layers.
Every pass begins at once and whole on all ranks: what MLX puts off until somebody asks would be
asked for on the leader alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from queue import Empty
from typing import Any, NoReturn, Protocol

import mlx.core as mx

from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.forest import Rows
from dflash_mlx.verifier.hooks import route_attention
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.saved import Saved
from dflash_mlx.verifier.sequence import SequenceCache
from kernels_metal.dispatch import Mode

_TAKEN_BACK = 10.0  # seconds in which a pass that fails here fails on the leader, too
_ON_CACHES = ("commit", "lengthen", "discard", "mark", "mark_chunk", "trim")


class Orders:
    """What the followers have not been told yet; it travels with the next pass.

    tell: sends JSON to all of them. stuck: ends all ranks with a sentence.
    """

    def __init__(self, tell: Callable[[Any], None], stuck: Callable[[str], NoReturn]) -> None:
        self._tell, self._stuck, self._numbers = tell, stuck, count()
        self._waiting: deque[tuple[Any, ...]] = deque()  # a cache may go on another thread

    def note(self, *order: Any) -> None:
        """One order, for later."""
        self._waiting.append(order)

    def send(self, *order: Any) -> None:
        """One order and all before it, now."""
        self.note(*order)
        self._tell([self._waiting.popleft() for _ in range(len(self._waiting))])

    def start(self, arrays: Sequence[mx.array | None]) -> None:
        """Let a pass begin here. What then fails cannot be taken back: others wait for its sums."""
        try:
            mx.async_eval(*(array for array in arrays if array is not None))
        except Exception as error:
            self._stuck(f"a pass failed on rank 0: {error}")

    def lead(self, cache: SequenceCache, *how: Any) -> LedCache:
        """`cache` as one of which all ranks have a part. how: the followers come by theirs."""
        led = LedCache(cache, self, next(self._numbers))
        self.note(*how, led.number)
        weakref.finalize(led, self.note, "drop", led.number).atexit = False
        return led


class LedCache(SequenceCache):
    """A cache whose counterparts on other ranks do what it does."""

    def __init__(self, cache: SequenceCache, orders: Orders, number: int) -> None:
        super().__init__(cache.layers, cache._recurrent)
        self.number, self._orders = number, orders

    def commit(self, path: Sequence[int]) -> None:
        """As of any cache."""
        super().commit(path)
        self._orders.note("commit", self.number, [*map(int, path)])

    def lengthen(self, rows: int) -> None:
        """As of any cache."""
        super().lengthen(rows)
        self._orders.note("lengthen", self.number, int(rows))

    def discard(self) -> None:
        """As of any cache."""
        super().discard()
        self._orders.note("discard", self.number)

    def mark(self, length: int) -> None:
        """As of any cache."""
        super().mark(length)
        self._orders.note("mark", self.number, int(length))

    def mark_chunk(self) -> None:
        """As of any cache."""
        super().mark_chunk()
        self._orders.note("mark_chunk", self.number)

    def trim(self, length: int) -> None:
        """As of any cache."""
        super().trim(length)
        self._orders.note("trim", self.number, int(length))

    def fork(self) -> LedCache:
        """As of any cache."""
        return self._orders.lead(super().fork(), "fork", self.number)

    def saved(self) -> Saved:
        """RuntimeError: a part of it is on other ranks."""
        raise RuntimeError("its keys and values are on several machines")

    def restore(self, saved: Saved) -> None:
        """RuntimeError: a part of it is on other ranks."""
        raise RuntimeError("its keys and values are on several machines")


class Leader(Target):
    """A target of which the first rank has its part, and whose passes all ranks compute."""

    def __init__(self, model: Any, context_length: int, name: str, orders: Orders) -> None:
        self._orders = orders
        super().__init__(model, context_length, name)

    def new_cache(self) -> LedCache:
        """An empty cache, on every rank."""
        return self._orders.lead(super().new_cache(), "new")

    def use_kernels(self, mode: Mode) -> None:
        """Switch the kernels of every rank."""
        super().use_kernels(mode)
        self._orders.note("use_kernels", mode)

    def widen(self, dtype: mx.Dtype) -> None:
        """Cast every rank's part."""
        super().widen(dtype)
        self._orders.note("widen", str(dtype).rpartition(".")[2])

    def forward(
        self,
        tokens: mx.array,
        cache: SequenceCache,
        block: Block,
        aux_layers: tuple[int, ...] = (),
        embeddings: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """A pass that begins at once, on every rank; waits for `tokens`."""
        with self._told([Rows(tokens, cache, block)]):
            found = super().forward(tokens, cache, block, aux_layers, embeddings)
        self._orders.start(found)
        return found

    def _together(
        self, sequences: Sequence[Rows], aux_layers: tuple[int, ...]
    ) -> list[tuple[mx.array, mx.array | None]]:
        with self._told(sequences):
            found = super()._together(sequences, aux_layers)
        self._orders.start([array for pair in found for array in pair])
        return found

    @contextmanager
    def _told(self, sequences: Sequence[Rows]) -> Iterator[None]:
        """Within it a pass is prepared, which the followers prepare at the same time."""
        self._orders.send("pass", [_as_json(rows) for rows in sequences])
        try:
            yield
        except Exception:
            self._orders.send("failed")
            raise


def _as_json(rows: Rows) -> list[Any]:
    assert isinstance(rows.cache, LedCache)
    block = rows.block
    parents = None if block.tree is None else block.tree.parents
    about = [block.rows, parents, block.branches, block.before]
    return [rows.cache.number, rows.tokens.tolist(), about]


class Hears(Protocol):
    """The next list of orders; queue.Empty where none comes within `seconds`."""

    def __call__(self, *, seconds: float | None = None) -> list[list[Any]]:
        """Wait for it."""


class Follower:
    """Does with its part of a target what the leader does. caches: by the leader's numbers."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.caches: dict[int, SequenceCache] = {}
        self._routed = False

    def replay(self, hear: Hears) -> None:
        """Go on for ever; raises what goes wrong here and not on the leader."""
        failed: Exception | None = None
        while True:
            try:
                orders = hear(seconds=None if failed is None else _TAKEN_BACK)
            except Empty:
                assert failed is not None
                raise failed from None
            for name, *given in orders:
                if name == "failed":
                    if failed is None:  # its sums were those of the leader's next pass
                        raise RuntimeError("it computes a pass that failed on rank 0 alone")
                    failed = None
                elif name == "drop":  # which a collector may note at any moment
                    self._do(name, *given)
                elif failed is not None:
                    raise failed
                elif name == "pass":
                    failed = self._pass(*given)
                else:
                    self._do(name, *given)

    def _pass(self, sequences: list[Any]) -> Exception | None:
        """This rank's part of a pass, or why there is none; what it says is the leader's to ask."""
        try:
            rows = [self._rows(*each) for each in sequences]
            found = [self.target.forward(*rows[0][:3])] if len(rows) == 1 else self._together(rows)
        except Exception as error:
            return error
        mx.eval([logits for logits, _ in found])
        return None

    def _together(self, rows: list[Rows]) -> list[tuple[mx.array, mx.array | None]]:
        """As the leader, which has prepared its model when it found out whether it joins them."""
        self._routed = self._routed or route_attention(self.target.model)
        return self.target._together(rows, ())

    def _rows(self, number: int, tokens: list[int], about: list[Any]) -> Rows:
        rows, parents, branches, before = about
        tree = None if parents is None else Tree((0,) * (len(parents) - 1), tuple(parents))
        block = Block(rows, tree, branches, last_only=True, before=before)
        return Rows(mx.array(tokens), self.caches[number], block)

    def _do(self, name: str, *given: Any) -> None:
        """An order between passes."""
        if name in _ON_CACHES:
            number, *more = given
            getattr(self.caches[number], name)(*more)
            if name in ("commit", "trim"):  # which nobody asks for here; no sum is left in it
                mx.async_eval(self.caches[number].arrays)
        elif name == "new":
            self.caches[given[0]] = self.target.new_cache()
        elif name == "fork":
            self.caches[given[1]] = self.caches[given[0]].fork()
        elif name == "drop":
            del self.caches[given[0]]
        elif name == "use_kernels":
            self.target.use_kernels(given[0])
            self._routed = False  # hooks were replaced
        elif name == "widen":
            self.target.widen(getattr(mx, given[0]))
        else:
            raise ValueError(f"there is no order {name!r}")
