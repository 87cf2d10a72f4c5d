"""How much memory the caches of sequences take, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import STEP
from dflash_mlx.verifier.model import Target


class CacheMemory:
    """Bytes of the caches of target and drafter, with a limit."""

    def __init__(self, target: Target, limit: int | None) -> None:
        self.limit = limit  # bytes, None for no limit
        self._target = target
        # By drafter: bytes of STEP tokens, and of twice as many.
        self._sizes: WeakKeyDictionary[Drafter, list[int]] = WeakKeyDictionary()

    def check(self, sequence: Sequence) -> None:
        """Raise DFlashError for a sequence that alone would not fit."""
        if self.limit is None:
            return
        tokens = sequence.state.end + 1
        if (need := self.bytes_of(sequence.drafter, tokens)) > self.limit:
            raise DFlashError(
                f"an answer of up to {tokens} tokens, the prompt included, takes {amount(need)}, "
                f"more than the limit of {amount(self.limit)}",
                "ask for a shorter one, shorten the prompt, or raise the limit",
            )

    def left(self, running: Iterable[Sequence]) -> int | None:
        """Bytes that these sequences leave to others, less than 0 where they take too much.

        None where there is no limit.
        """
        return None if self.limit is None else self.limit - self.used(running)

    def used(self, running: Iterable[Sequence]) -> int:
        """Bytes of these sequences, those that prompts will need included."""
        return sum(map(self.reserved, running))

    def reserved(self, sequence: Sequence) -> int:
        """Bytes that a sequence takes, or will as soon as its prompt is read."""
        now = sequence.state.nbytes
        if self.limit is None or not sequence.is_reading:
            return now
        prompt = self.bytes_of(sequence.drafter, len(sequence.prompt) + 1)
        return max(now, sequence.preempted_nbytes, prompt)

    def bytes_of(self, drafter: Drafter, tokens: int) -> int:
        """What a sequence of so many tokens takes, by two short passes per drafter."""
        if drafter not in self._sizes:
            state, sizes = State(self._target.new_cache(), drafter.new_context()), []
            for rows in (STEP, STEP):
                ids, layers = mx.zeros(rows, mx.int32), drafter.aux_layers
                _, features = self._target.forward(ids, state.cache, Block(rows), layers)
                state.cache.commit(range(rows))
                state.context.append(ids, features)
                sizes.append(sum(a.nbytes for a in (*state.cache.arrays, *state.context.arrays)))
            self._sizes[drafter] = sizes
        least, more = self._sizes[drafter]
        return least + (more - least) * (tokens // STEP)
