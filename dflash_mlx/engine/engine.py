"""Many answers at once: which sequences take part in the next pass, and which have to wait."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import mlx.core as mx

from dflash_mlx.core.amounts import amount
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.observer import Observer
from dflash_mlx.engine.cache_key import CacheKey
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.state import State
from dflash_mlx.engine.step import Outcome, Running, step
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import STEP
from dflash_mlx.verifier.model import Target

LONGEST = 1.75  # times a step without prompts that one with a chunk of a prompt may take
_LEAST_CHUNK, _UNTIMED_CHUNK = 8, 64  # rows
_WORTH_SHARING = 64  # tokens that two prompts begin with


class Engine:
    """Answers in the making, all in one pass of the target per step; for one thread.

    memory: bytes that keys, values and recurrent states of all sequences may take, those of their
    drafters included; None for no limit. Sequences that would take more wait, in the order in which
    they came; where answers grow beyond it, the youngest is read again later. prefixes: where
    sequences go when they are over, `exact` ones excepted, and begin; it gives way to those that
    run. fair: whether prompts are read in chunks that the others' answers can bear; batch work has
    nobody who waits. most: sequences in a pass; further ones wait, too. waiting, running: the
    sequences, the oldest first.
    """

    def __init__(
        self,
        target: Target,
        memory: int | None = None,
        observer: Observer | None = None,
        prefixes: PrefixCache | None = None,
        fair: bool = True,
        most: int = sys.maxsize,
    ) -> None:
        self.target, self.memory, self.prefixes = target, memory, prefixes
        self.fair, self.most = fair, most
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self._observer = observer or Observer()
        self._rows = 1  # of trees in the last step
        # By drafter: bytes of STEP tokens, and of twice as many.
        self._sizes: WeakKeyDictionary[Drafter, list[int]] = WeakKeyDictionary()

    def add(self, sequence: Running) -> None:
        """Take in a sequence; raises as `check` does."""
        self.check(sequence)
        self.waiting.append(sequence)

    def check(self, sequence: Running) -> None:
        """Raise DFlashError for a sequence that alone would not fit into the memory."""
        tokens = sequence.state.end + 1
        if (
            self.memory is not None
            and (need := self.bytes_of(sequence.drafter, tokens)) > self.memory
        ):
            raise DFlashError(
                f"an answer of up to {tokens} tokens, the prompt included, takes {amount(need)}, "
                f"more than the limit of {amount(self.memory)}",
                "ask for a shorter one, shorten the prompt, or raise the limit",
            )

    def cancel(self, sequence: Running) -> None:
        """Give up a sequence, wherever it is; the others do not notice. What it read is kept."""
        if self._remove(sequence) and self.prefixes is not None and not sequence.exact:
            self.prefixes.put(sequence.state, self.target, sequence.drafter)

    def _remove(self, sequence: Running) -> bool:
        """Whether it was still here."""
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
                return True
        return False

    def step(self) -> list[tuple[Running, Outcome]]:
        """One pass; what became of every sequence in it.

        Those that failed, or have no room for more tokens, are no longer running.
        """
        self._admit()
        self._schedule_prefill()
        running = [each for each in self.running if each.allowed or not each.is_reading]
        outcomes = list(zip(running, step(self.target, running, self._observer), strict=True))
        trees = [o.proposal.tree for _, o in outcomes if o and not isinstance(o, Exception)]
        self._rows = max(1, sum(map(len, trees)))
        for each, outcome in outcomes:
            if isinstance(outcome, Exception):
                self._remove(each)  # nobody knows what it left behind
            elif each.state.has_begun and each.state.remaining <= 0:
                self.cancel(each)
        self._make_room()
        return outcomes

    @property
    def used(self) -> int:
        """Bytes of the running sequences, those that prompts will need included."""
        return sum(map(self._reserved, self.running))

    def bytes_of(self, drafter: Drafter, tokens: int) -> int:
        """What a sequence of so many tokens takes, by two short passes per drafter."""
        if drafter not in self._sizes:
            state, sizes = State(self.target.new_cache(), drafter.new_context()), []
            for rows in (STEP, STEP):
                ids = mx.zeros(rows, mx.int32)
                _, features = self.target.forward(ids, state.cache, Block(rows), drafter.aux_layers)
                state.cache.commit(range(rows))
                state.context.append(ids, features)
                sizes.append(sum(a.nbytes for a in (*state.cache.arrays, *state.context.arrays)))
            self._sizes[drafter] = sizes
        least, more = self._sizes[drafter]
        return least + (more - least) * (tokens // STEP)

    def _admit(self) -> None:
        """Begin with those that wait, as long as there is memory for what they read."""
        while self.waiting and len(self.running) < self.most:
            first = self.waiting[0]
            limit = self.memory if self.running else None
            if limit is not None and self.used + self._reserved(first) > limit:
                return
            self.running.append(self.waiting.popleft())

    def _begin(self, sequence: Running, older: Sequence[Running]) -> bool:
        """Let it go on from what others have read. False: it waits for what an older one reads."""
        if self.prefixes is None or sequence.exact or sequence.has_looked:
            return True
        if sequence.state.position:  # whoever made it has read that
            return True
        cache_key = CacheKey.of(self.target, sequence.drafter, sequence.state)
        alike = [
            each
            for each in older
            if not each.exact and CacheKey.of(self.target, each.drafter, each.state) == cache_key
        ]
        recurrent = sequence.state.cache.is_recurrent  # whose ways back are few
        if not recurrent and any(_reads_for(each, sequence.prompt) for each in alike):
            return False
        shared = [e.state for e in alike if e.state.match_length(sequence.prompt) >= _WORTH_SHARING]
        found = self.prefixes.take(sequence.prompt, self.target, sequence.drafter, shared)
        sequence.restore_from(found)
        return True

    def _give_way(self) -> None:
        if self.prefixes is not None and self.memory is not None:
            self.prefixes.give_way(max(0, self.memory - self.used))

    def _reserved(self, sequence: Running) -> int:
        """Bytes that it takes, or will as soon as its prompt is read."""
        now = sequence.state.nbytes
        if self.memory is None or not sequence.is_reading:
            return now
        return max(now, sequence.took, self.bytes_of(sequence.drafter, len(sequence.prompt) + 1))

    def _schedule_prefill(self) -> None:
        """Let prompts ride along, the oldest first, as far as the others' answers can bear it."""
        decoding = [each for each in self.running if not each.is_reading]
        left = None if decoding and self.fair else sys.maxsize
        for i, each in enumerate(self.running):
            if each.is_reading:
                may = self._begin(each, self.running[:i])
                if may and left is None:
                    left = self._bearable(decoding, each.state.position)
                each.allowed = left if may and left is not None else 0
                left_of_it = len(each.prompt) - each.state.position
                left = left and left - min(each.allowed, each.chunk, left_of_it)
        self._give_way()

    def _bearable(self, decoding: Sequence[Running], position: int) -> int:
        """Rows of a prompt with which a step takes at most `LONGEST` times what it takes without.

        position: where they begin. What is read of all contexts together counts by rows, and no
        answer's for less than it is long.
        """
        times, trees = self.target.pass_times, self._rows
        if times is None:
            return _UNTIMED_CHUNK
        usual = sum(each.state.position for each in decoding) / len(decoding)

        def seconds(rows: int) -> float:
            mean = (trees * usual + rows * position) / (trees + rows)
            return float(times.of(trees + rows, [max(usual, mean)]))

        most = bisect_right(range(1, 1024), LONGEST * seconds(0), key=seconds)
        return max(most, _LEAST_CHUNK)

    def _make_room(self) -> None:
        """Drop what is kept, then the caches of the youngest, until the others have room."""
        self._give_way()
        while self.memory is not None and len(self.running) > 1 and self.used > self.memory:
            again = [each for each in self.running if not (each.rule and each.rule.remembers)]
            if not again or again[-1] is self.running[0]:
                return
            youngest = again[-1]
            self._remove(youngest)
            youngest.took = youngest.state.nbytes
            youngest.drop(self.target)
            self.waiting.appendleft(youngest)


def _reads_for(sequence: Running, prompt: Sequence[int]) -> bool:
    """Whether it is about to read more of what `prompt` begins with, and that is worth a wait."""
    end = sequence.state.position + _WORTH_SHARING
    alike = len(prompt) > end and [*sequence.prompt[:end]] == [*prompt[:end]]
    return sequence.is_reading and alike
