"""The memory of answers and of what is kept of earlier ones: one budget beside the models."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import mlx.core as mx

from dflash_mlx.core.config import PrefixConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.prefix_files import CacheKey
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import available_memory, free_memory, memory_limit
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import STEP
from dflash_mlx.verifier.model import Target


def for_caches(held: int = 0, free: int | None = None) -> int:
    """Bytes for caches and kept prefixes together: half of what is free, or held by them now."""
    return ((free_memory() if free is None else free) + held) // 2


def budget(pair: int, kept: PrefixConfig, target: Target | None = None) -> dict[str, str]:
    """How the memory is shared out, in words. pair: bytes that it needs. target: for its window."""
    free = free_memory()
    caches = CacheMemory(for_caches(free=max(0, free - pair)))
    told = {
        "limit": f"{amount(memory_limit())} for this process, of which {amount(free)} are free",
        "pair": f"{amount(pair)}; of several models idle ones go first",
        "caches": f"{amount(caches.limit or 0)} for answers and kept prefixes; these go first",
        "prefixes": f"{amount(prefix_bytes(kept))} of that at most, and those used last at least",
        "texts": f"{amount(kept.lookup_mb * 1e6)} of earlier ones, for each model; these go next",
    }
    if target is not None:
        wider = mx.float32.size // target.dtype.size if on_cpu() else 1  # as it is loaded there
        fits = caches.window(target, NoDraft()) // wider
        told["window"] = f"about {fits:,} tokens of one conversation fit into the caches"
    return told


def prefix_bytes(kept: PrefixConfig) -> int:
    """For prefixes in memory, at most."""
    return available_memory() // 16 if kept.prefix_gb is None else int(kept.prefix_gb * 1e9)


def is_short() -> bool:
    """Whether so little is left that something has to go."""
    return free_memory() < memory_limit() // 16


class CacheMemory:
    """Bytes of the caches of targets and drafters, with a limit for all of them together."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit  # bytes, None for no limit
        # Bytes of STEP tokens, and of twice as many, by what is in the caches, and by drafter.
        self._by_key: dict[CacheKey, list[int]] = {}
        self._sizes: WeakKeyDictionary[Drafter, list[int]] = WeakKeyDictionary()

    def check(self, sequence: Sequence) -> None:
        """Raise DFlashError for a sequence that alone would not fit."""
        if self.limit is None:
            return
        tokens = sequence.state.end + 1
        if (need := self.bytes_of(sequence.target, sequence.drafter, tokens)) > self.limit:
            fits = self.window(sequence.target, sequence.drafter)
            raise DFlashError(
                f"an answer of up to {tokens} tokens, the prompt included, takes {amount(need)}, "
                f"more than the limit of {amount(self.limit)}, into which {fits} tokens fit",
                "ask for a shorter one, shorten the prompt, or raise the limit",
            )

    def left(self, running: Iterable[Sequence]) -> int | None:
        """Bytes that these leave to others, perhaps below 0; None without a limit."""
        return None if self.limit is None else self.limit - self.used(running)

    def used(self, running: Iterable[Sequence]) -> int:
        return sum(map(self.reserved, running))

    def reserved(self, sequence: Sequence) -> int:
        """Bytes that a sequence takes, or will as soon as its prompt is read."""
        now = sequence.state.nbytes
        if self.limit is None or not sequence.is_reading:
            return now
        tokens = len(sequence.prompt) + 1
        prompt = self.bytes_of(sequence.target, sequence.drafter, tokens)
        return max(now, sequence.preempted_nbytes, prompt)

    def bytes_of(self, target: Target, drafter: Drafter, tokens: int) -> int:
        """What a sequence of so many tokens takes, by two passes over one row."""
        if drafter not in self._sizes:
            state = State(target.new_cache(), drafter.new_context())
            key = CacheKey.of(target, drafter, state)
            self._sizes[drafter] = self._by_key.get(key) or _measured(target, drafter, state)
            self._by_key[key] = self._sizes[drafter]
        least, more = self._sizes[drafter]
        return least + (more - least) * (tokens // STEP)

    def window(self, target: Target, drafter: Drafter) -> int:
        """Tokens of one conversation that fit, at most those that the target can hold."""
        least, more = (self.bytes_of(target, drafter, tokens) for tokens in (0, STEP))
        steps = ((self.limit or 0) - least) // max(1, more - least) + 1
        return max(0, min(steps * STEP - 1, target.context_length))

    def forget(self, target: Target) -> None:
        """Know no more of a target, which its keys would keep in memory."""
        self._by_key = {k: sizes for k, sizes in self._by_key.items() if k.target is not target}


def _measured(target: Target, drafter: Drafter, state: State) -> list[int]:
    sizes: list[int] = []
    for lengthened in (0, STEP - 1):
        state.cache.lengthen(lengthened)
        ids, layers = mx.zeros(1, mx.int32), drafter.aux_layers
        _, features = target.forward(ids, state.cache, Block(1), layers)
        state.cache.commit(range(1))
        rows = None if features is None else mx.repeat(features, STEP, axis=0)
        state.context.append(mx.zeros(STEP, mx.int32), rows)
        ways = sum(part.ways * sum(a.nbytes for a in part.arrays) for part in state.cache.parts)
        arrays = (*state.cache.arrays, *state.context.arrays)
        sizes.append(ways + sum(array.nbytes for array in arrays))
    return sizes
