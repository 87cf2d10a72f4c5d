"""Which sequences take part in the next pass, and which have to wait."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import abc, deque
from collections.abc import Hashable, Iterable
from functools import partial
from time import perf_counter

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import Observer
from dflash_mlx.drafters.methods import drafting_of, make_drafter, settle
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefix_files import CacheKey
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence, Status, make_sequence
from dflash_mlx.engine.state import Earlier
from dflash_mlx.engine.step import guarded, step
from dflash_mlx.session.memory import CacheMemory
from dflash_mlx.verifier.model import Target

LONGEST = 1.75  # times a step without prompts that one with a chunk of a prompt may take
UNUSED = 8  # drafters that are kept for answers to come: a draw of each temperature has its own
_LEAST_CHUNK, _UNTIMED_CHUNK = 8, 64  # rows
_WORTH_SHARING = 64  # tokens that two prompts begin with

Said = list[tuple[Sequence, Delta | Exception]]  # what a step brings, in order
# By the target, and what those that draft alike have in common.
Drafters = dict[tuple[Target, Hashable], Drafter]


class Scheduler:
    """Answers in the making, all those of a target in one pass; for one thread.

    A step is a pass of one target; several have equal shares of the time. Sequences whose caches
    would not fit into `memory` wait, in the order in which they came; where answers grow beyond it,
    the youngest is preempted and read again later. Sequences that draft alike share a drafter,
    which drafts for all of them in one pass where it can.
    """

    def __init__(
        self,
        pair: Pair | None = None,
        memory: int | None = None,
        observer: Observer | None = None,
        prefixes: PrefixCache | None = None,
        most: int = sys.maxsize,
    ) -> None:
        self.pair = pair  # of sequences for which no other is given
        self.target: Target | None = None  # of the last pass
        self.memory = CacheMemory(memory)  # bytes, None for no limit
        # Where sequences begin, and go when they are over, `exact` ones excepted; it gives way to
        # those that run.
        self.prefixes = prefixes
        self.most = most  # sequences in a pass; further ones wait
        # Whether prompts are read in chunks that the others' answers can bear; batch work has
        # nobody who waits.
        self.fair = True
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # the oldest first
        self.observer = observer or Observer()
        self.drafters: Drafters = {}
        self._finished: deque[Sequence] = deque()  # whose prefixes are to be kept
        self._rows: dict[Target, int] = {}  # of trees in its last pass
        self._seconds: dict[Target, float] = {}  # of its steps, while sequences of it run

    def __len__(self) -> int:
        """Sequences that are not finished, those that wait included."""
        return len(self.running) + len(self.waiting)

    @property
    def used(self) -> int:
        return self.memory.used(self.running)

    def submit(
        self,
        prompt: Prompt | Iterable[int],
        config: DecodeConfig | None = None,
        pair: Pair | None = None,
        earlier: Earlier | None = None,
    ) -> Sequence:
        """Take in a prompt, the whole conversation so far; `step` brings its answer.

        earlier: where drafts may come from, and what all that was said is added to.
        Raises DFlashError where the prompt is empty or does not fit the context or the memory, and
        where the method or the grammar does not fit the pair.
        """
        pair = pair or self.pair
        assert pair is not None
        config = settle(config or DecodeConfig(), pair.capabilities)
        drafter, alone = self.drafter(config, pair), self.most == 1
        sequence = make_sequence(pair, Prompt.of(prompt), config, drafter, alone)
        sequence.state.earlier = earlier
        self.add(sequence)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence that was made elsewhere; DFlashError where the memory is too small."""
        self.memory.check(sequence)
        self.waiting.append(sequence)

    def drafter(self, config: DecodeConfig, pair: Pair) -> Drafter:
        """One for all that draft alike; of those that nobody uses, the newest few are kept."""
        key = pair.target, drafting_of(config)
        drafter = self.drafters.pop(key, None) or make_drafter(pair, config)
        used = {id(each.drafter) for each in (*self.running, *self.waiting)}
        unused = [k for k, kept in self.drafters.items() if id(kept) not in used]
        for oldest in unused[: max(0, len(unused) - UNUSED)]:
            del self.drafters[oldest]
        self.drafters[key] = drafter
        return drafter

    def window(self, config: DecodeConfig, pair: Pair) -> tuple[int, int]:
        """Bytes for caches, and the tokens of one conversation that fit into them."""
        drafter = self.drafter(settle(config, pair.capabilities), pair)
        return self.memory.limit or 0, self.memory.window(pair.target, drafter)

    def cancel(self, sequence: Sequence) -> None:
        """Give up a sequence, wherever it is; the others do not notice. What it read is kept."""
        if self.drop(sequence):
            _remember(sequence)
            self._finished.append(sequence)
        self.keep_finished()

    def keep_finished(self) -> None:
        """Keep what finished sequences read, which may take time: their last deltas are told."""
        while self._finished:
            sequence = self._finished.popleft()
            if self.prefixes is not None and not sequence.config.exact:
                state, target, drafter = sequence.state, sequence.target, sequence.drafter
                guarded(partial(self.prefixes.put, state, target, drafter))

    def forget(self, target: Target) -> bool:
        """Know no more of a target that nothing here runs; whether that is so now.

        Each call writes at most one prefix to the disk, as passes of others may wait for it.
        """
        if self.prefixes is not None and not self.prefixes.forget(target):
            return False
        self.drafters = {key: kept for key, kept in self.drafters.items() if key[0] is not target}
        self.memory.forget(target)
        self._rows.pop(target, None)
        self._seconds.pop(target, None)
        self.target = None if self.target is target else self.target
        return True

    def drop(self, sequence: Sequence) -> bool:
        """Give up a sequence whose caches cannot be trusted any more; whether it was there."""
        sequence.status = Status.FINISHED
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
                return True
        return False

    def step(self) -> Said:
        """One pass; what it added to answers, and what failed, which is over then."""
        self.keep_finished()
        begin = perf_counter()
        batch, said = self._schedule()
        passing = [each for each in batch if not each.is_full]
        reading = [each for each in passing if each.is_reading]
        outcomes = step(self.target, passing, self.observer) if self.target else []
        for each in reading:
            if not each.is_reading:
                self.observer.prefilled(len(each.prompt), len(each.prompt))
                self.observer.start()
        rows = 0
        for each, outcome in zip(passing, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.drop(each)  # nobody knows what it left behind
                said.append((each, outcome))
            elif outcome is not None:
                each.rounds.append(outcome)
                rows += len(outcome.proposal.tree)
        if self.target is not None:
            self._rows[self.target] = rows
        # A lone sequence whose next tree does not depend on what was said runs ahead of its reader.
        ahead = batch[0].rounds_ahead if len(batch) == len(self.running) == 1 else 0
        for each in batch:
            failed = guarded(partial(self._read, each, ahead, said))
            if failed is not None:
                self.drop(each)
                said.append((each, failed))
        self._preempt()
        if self.target in self._seconds:
            self._seconds[self.target] += perf_counter() - begin
        return said

    def _schedule(self) -> tuple[list[Sequence], Said]:
        """Who takes part in the next pass, and those that could not begin."""
        failed = self._admit()
        self._take_turn()
        own = [each for each in self.running if each.target is self.target]
        reading = [each for each in own if each.is_reading]
        left = sys.maxsize
        if reading and self.fair and not all(each.is_reading for each in self.running):
            decoding = [each for each in own if not each.is_reading]
            left = self._bearable(reading[0].target, decoding, reading[0].state.position)
        for each in reading:
            self.observer.prefilled(each.state.position, len(each.prompt))
            each.chunk_limit = left
            left = max(0, left - each.next_chunk())
        self.make_room()
        return [each for each in own if each.chunk_limit or not each.is_reading], failed

    def _take_turn(self) -> None:
        """Choose the target that had least time; a new one begins level with the least of them."""
        targets = {each.target: None for each in self.running}
        known = [self._seconds[each] for each in targets if each in self._seconds]
        least = min(known, default=0.0)
        self._seconds = {each: self._seconds.get(each, least) for each in targets}
        self.target = min(targets, key=self._seconds.__getitem__, default=self.target)

    def _admit(self) -> Said:
        """Begin with those that there is room for; what could not begin."""
        failed: Said = []
        for each in [*self.waiting]:
            if len(self.running) >= self.most:
                break
            alike = self._alike(each)
            if any(_reads_for(other, each.prompt) for other in alike or ()):
                continue  # it takes nobody's place meanwhile
            left = self.memory.left(self.running)
            if self.running and left is not None and self.memory.reserved(each) > left:
                break
            if (problem := guarded(partial(self.memory.check, each))) is not None:
                self.drop(each)  # as there was more memory when it was taken in
                failed.append((each, problem))
                continue
            each.status = Status.PREFILL if each.is_reading else Status.DECODE
            self.waiting.remove(each)
            self.running.append(each)
            if alike is None:
                continue
            if (problem := guarded(partial(self._begin, each, alike))) is not None:
                self.drop(each)
                failed.append((each, problem))
        return failed

    def _alike(self, sequence: Sequence) -> list[Sequence] | None:
        """The running ones whose caches it could go on with; None where it reads all by itself."""
        if self.prefixes is None or sequence.config.exact or sequence.looked_for_prefix:
            return None
        if sequence.state.position or sequence.misses_logprobs:  # whoever made it has read that
            return None
        key = CacheKey.of(sequence.target, sequence.drafter, sequence.state)
        others = [each for each in self.running if not each.config.exact]
        keys = (CacheKey.of(each.target, each.drafter, each.state) for each in others)
        return [each for each, its in zip(others, keys, strict=True) if its == key]

    def _begin(self, sequence: Sequence, alike: abc.Sequence[Sequence]) -> None:
        """Let it go on from what others have read, finished ones or these."""
        assert self.prefixes is not None
        prompt = sequence.prompt
        least = min(_WORTH_SHARING, len(prompt) - 1)
        shared = [each.state for each in alike if each.state.match_length(prompt) >= least]
        found = self.prefixes.take(prompt, sequence.target, sequence.drafter, shared)
        sequence.restore_from(found)
        sequence.looked_for_prefix = True

    def _bearable(self, target: Target, decoding: abc.Sequence[Sequence], position: int) -> int:
        """Prompt rows from `position` on that make a step at most `LONGEST` times as long.

        decoding: in that step; where none is, those of other targets wait for it.
        """
        times, trees = target.pass_times, max(1, self._rows.get(target, 0))
        if times is None:
            return _UNTIMED_CHUNK
        usual = sum(each.state.position for each in decoding) / max(1, len(decoding))

        def seconds(rows: int) -> float:
            mean = (trees * usual + rows * position) / (trees + rows)
            return float(times.of(trees + rows, [max(usual, mean)]))

        most = bisect_right(range(1, 1024), LONGEST * seconds(0), key=seconds)
        return max(most, _LEAST_CHUNK)

    def _read(self, sequence: Sequence, ahead: int, said: Said) -> None:
        """Tell the finished rounds of a sequence, but for the last few that may still run."""
        while sequence.rounds and (len(sequence.rounds) > ahead or sequence.is_full):
            _ = sequence.rounds[0].accepted.tokens  # waits for them
            self.observer.mark("verify")
            delta = sequence.next_delta()
            said.append((sequence, delta))
            sequence.resume()  # nobody is waited for between two steps
            if delta.finish_reason is not None:
                sequence.rounds.clear()
                _remember(sequence)
                sequence.state.trim(sequence.length - 1)
                self.drop(sequence)
                self._finished.append(sequence)

    def make_room(self) -> None:
        """Let prefixes go whose memory those that run need, or that is over the limit."""
        left = self.memory.left(self.running)
        if self.prefixes is not None and left is not None:
            self.prefixes.shrink(max(0, left))

    def _preempt(self) -> None:
        """Let prefixes go, then the youngest, until the others have room."""
        self.make_room()
        while len(self.running) > 1 and (self.memory.left(self.running) or 0) < 0:
            again = [each for each in self.running if not each.rule.remembers]
            if not again or again[-1] is self.running[0]:
                return
            youngest = again[-1]
            self.running.remove(youngest)
            youngest.preempt()
            self.waiting.appendleft(youngest)


def _remember(sequence: Sequence) -> None:
    """Let later conversations draft from what was read and said in this one."""
    if (earlier := sequence.state.earlier) is not None:
        earlier.add(sequence.state.tokens[: sequence.length])


def _reads_for(sequence: Sequence, prompt: Prompt) -> bool:
    """Whether it is about to read more of what `prompt` begins with, and that is worth a wait."""
    if not sequence.is_reading:
        return False
    if sequence.prompt == prompt or sequence.state.cache.is_recurrent:  # whose ways back are few
        return sequence.prompt == prompt
    end = sequence.state.position + _WORTH_SHARING
    return len(prompt) > end and [*sequence.prompt.keys[:end]] == [*prompt.keys[:end]]
