"""Which sequences take part in the next pass, and which have to wait."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import abc, deque
from collections.abc import Hashable, Iterable
from functools import partial
from weakref import WeakKeyDictionary

import mlx.core as mx

from dflash_mlx.core.amounts import amount
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.drafters.methods import drafting_of, make_drafter, settle
from dflash_mlx.engine.acceptance import (
    AcceptanceRule,
    KeepLogits,
    RejectionSampling,
    TargetSampling,
)
from dflash_mlx.engine.cache_key import CacheKey
from dflash_mlx.engine.constraint import MaskedSampler
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.exact import NearTieGuard, noise_of
from dflash_mlx.engine.grammar import constraint_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.prefixes import PrefixCache
from dflash_mlx.engine.sequence import Sequence, Status, check_length
from dflash_mlx.engine.state import State
from dflash_mlx.engine.step import guarded, step
from dflash_mlx.engine.text import StopText
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.cache import STEP
from dflash_mlx.verifier.model import Target

LONGEST = 1.75  # times a step without prompts that one with a chunk of a prompt may take
UNUSED = 8  # drafters that are kept for answers to come: a draw of each temperature has its own
_LEAST_CHUNK, _UNTIMED_CHUNK = 8, 64  # rows
_WORTH_SHARING = 64  # tokens that two prompts begin with

Told = list[tuple[Sequence, Delta | Exception]]  # what a step brings, in order


class Scheduler:
    """Answers in the making with one pair, all in one pass of the target per step; for one thread.

    Sequences whose caches would not fit into `memory` wait, in the order in which they came; where
    answers grow beyond it, the youngest is preempted and read again later. Sequences that draft
    alike share a drafter, which drafts for all of them in one pass where it can.
    """

    def __init__(
        self,
        pair: Pair,
        memory: int | None = None,
        observer: Observer | None = None,
        prefixes: PrefixCache | None = None,
        most: int = sys.maxsize,
        drafters: dict[Hashable, Drafter] | None = None,
    ) -> None:
        self.pair, self.target = pair, pair.target
        self.memory = memory  # bytes for caches of targets and drafters, None for no limit
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
        self._drafters = {} if drafters is None else drafters
        self._behind: dict[Sequence, list[Sequence]] = {}  # by that whose prompt they share
        self._rows = 1  # of trees in the last step
        # By drafter: bytes of STEP tokens, and of twice as many.
        self._sizes: WeakKeyDictionary[Drafter, list[int]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Sequences that are not finished, those that wait included."""
        return len(self.running) + len(self.waiting) + sum(map(len, self._behind.values()))

    def submit(
        self,
        prompt: Prompt | Iterable[int],
        config: DecodeConfig | None = None,
        behind: Sequence | None = None,
    ) -> Sequence:
        """Take in a prompt, the whole conversation so far; `step` brings its answer.

        behind: a sequence with the same prompt, which is read once where prefixes are kept. Raises
        DFlashError where the prompt is empty or does not fit the context or the memory, and where
        the method or the grammar does not fit the pair.
        """
        sequence = self.sequence(Prompt.of(prompt), config or DecodeConfig())
        self._check(sequence)
        waits = behind is not None and behind.status is not Status.FINISHED
        if waits and self.prefixes is not None and not behind.statistics.generated_tokens:  # type: ignore[union-attr]
            self._behind.setdefault(behind, []).append(sequence)  # type: ignore[arg-type]
        else:
            self.waiting.append(sequence)
        return sequence

    def sequence(self, prompt: Prompt, config: DecodeConfig) -> Sequence:
        """A sequence that nothing was read of; raises as `submit`, but for the memory."""
        pair, target, config = self.pair, self.target, settle(config, self.pair.capabilities)
        check_length(target, prompt)
        constraint = constraint_of(pair, config, len(prompt))
        # With others in its passes plain decoding has near-ties to decide, too.
        exact = config.exact if self.most > 1 else config.guarded
        if exact:
            noise_of(target)  # now, not in the others' time
        drafter, sampler = self.drafter(config), Sampler(config.sampling)
        state = State(target.new_cache(), drafter.new_context())
        state.constraint = constraint
        last, most = len(prompt) - 1 + config.max_tokens, target.context_length - 1
        state.end = min(last, most)
        sequence = Sequence(
            state,
            drafter,
            prompt,
            prefill_step=config.prefill_step,
            rule=partial(make_rule, target, state, sampler, config, exact),
            exact=exact,
        )
        sequence.text = StopText(pair.tokenizer, config.stop)
        sequence.top_logprobs = config.logprobs or 0
        sequence.full = "length" if last <= most else "context"
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence that was made elsewhere; DFlashError where the memory is too small."""
        self._check(sequence)
        self.waiting.append(sequence)

    def _check(self, sequence: Sequence) -> None:
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

    def cancel(self, sequence: Sequence) -> None:
        """Give up a sequence, wherever it is; the others do not notice. What it read is kept."""
        if self._remove(sequence) and self.prefixes is not None and not sequence.exact:
            guarded(partial(self.prefixes.put, sequence.state, self.target, sequence.drafter))
        self._let_go(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Give up a sequence whose caches cannot be trusted any more."""
        self._remove(sequence)
        self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Begin those that waited for its prompt."""
        self.waiting.extend(self._behind.pop(sequence, ()))

    def _remove(self, sequence: Sequence) -> bool:
        """Whether it was still here."""
        sequence.status = Status.FINISHED
        for place in (self.waiting, self.running, *self._behind.values()):
            if sequence in place:
                place.remove(sequence)
                return True
        return False

    def step(self) -> Told:
        """One pass; what it added to answers, and what failed, which is over then."""
        self._admit()
        told: Told = []
        for each, error in self._schedule_prefill():
            self.drop(each)
            told.append((each, error))
        batch = [each for each in self.running if each.may_read or not each.is_reading]
        passing = [each for each in batch if not each.is_full]
        reading = [each for each in passing if each.is_reading]
        found = list(zip(passing, step(self.target, passing, self.observer), strict=True))
        trees = [o.proposal.tree for _, o in found if o and not isinstance(o, Exception)]
        self._rows = max(1, sum(map(len, trees)))
        for each in reading:
            if not each.is_reading:
                self.observer.prefilled(len(each.prompt), len(each.prompt))
                self.observer.start()
        for each, outcome in found:
            if isinstance(outcome, Exception):
                self.drop(each)  # nobody knows what it left behind
                told.append((each, outcome))
            elif outcome is not None:
                each.rounds.append(outcome)
        # A lone sequence whose next tree does not depend on what was said runs ahead of its reader.
        ahead = batch[0].rounds_ahead if len(batch) == 1 else 0
        for each in batch:
            told += self._read(each, ahead)
        self._make_room()
        return told

    def _read(self, sequence: Sequence, ahead: int) -> Told:
        """The finished rounds of a sequence, but for the last few that may still be running."""
        told: Told = []
        while sequence.rounds and (len(sequence.rounds) > ahead or sequence.is_full):
            first = not sequence.statistics.generated_tokens
            sequence.rounds[0].accepted.wait()
            self.observer.mark("verify")
            delta = sequence.next_delta()
            told.append((sequence, delta))
            sequence.resume()  # nobody is waited for between two steps
            if delta.finish_reason is not None:
                sequence.rounds.clear()
                sequence.state.trim(sequence.length - 1)
                self.cancel(sequence)
            elif first and sequence in self._behind:
                self._share(sequence)
        return told

    def _share(self, sequence: Sequence) -> None:
        """Let others go on from a prompt that has just been read."""
        if self.prefixes is not None and not sequence.exact:
            guarded(partial(self.prefixes.put, sequence.state, self.target, sequence.drafter))
        self._let_go(sequence)

    def drafter(self, config: DecodeConfig) -> Drafter:
        """One for all that draft alike; of those that nobody uses, the newest few are kept."""
        key = drafting_of(config)
        drafter = self._drafters.pop(key, None) or make_drafter(self.pair, config)
        used = {id(each.drafter) for each in (*self.running, *self.waiting)}
        unused = [k for k, kept in self._drafters.items() if id(kept) not in used]
        for oldest in unused[: max(0, len(unused) - UNUSED)]:
            del self._drafters[oldest]
        self._drafters[key] = drafter
        return drafter

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
            first.status = Status.PREFILL if first.is_reading else Status.DECODE
            self.running.append(self.waiting.popleft())

    def _begin(self, sequence: Sequence, older: abc.Sequence[Sequence]) -> bool:
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

    def _reserved(self, sequence: Sequence) -> int:
        """Bytes that it takes, or will as soon as its prompt is read."""
        now = sequence.state.nbytes
        if self.memory is None or not sequence.is_reading:
            return now
        return max(now, sequence.took, self.bytes_of(sequence.drafter, len(sequence.prompt) + 1))

    def _schedule_prefill(self) -> list[tuple[Sequence, Exception]]:
        """Let prompts ride along, the oldest first, as far as the others' answers can bear it.

        Returns those that could not begin.
        """
        failed: list[tuple[Sequence, Exception]] = []
        decoding = [each for each in self.running if not each.is_reading]
        left = None if decoding and self.fair else sys.maxsize
        for i, each in enumerate(self.running):
            if each.is_reading:
                may = guarded(partial(self._begin, each, self.running[:i]))
                if isinstance(may, Exception):
                    failed.append((each, may))
                    continue
                self.observer.prefilled(each.state.position, len(each.prompt))
                if may and left is None:
                    left = self._bearable(decoding, each.state.position)
                each.may_read = left if may and left is not None else 0
                left_of_it = len(each.prompt) - each.state.position
                left = left and left - min(each.may_read, each.prefill_step, left_of_it)
        self._give_way()
        return failed

    def _bearable(self, decoding: abc.Sequence[Sequence], position: int) -> int:
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
        """Drop prefixes, then preempt the youngest, until the others have room."""
        self._give_way()
        while self.memory is not None and len(self.running) > 1 and self.used > self.memory:
            again = [each for each in self.running if not (each.rule and each.rule.remembers)]
            if not again or again[-1] is self.running[0]:
                return
            youngest = again[-1]
            self.running.remove(youngest)
            youngest.preempt(self.target)
            self.waiting.appendleft(youngest)


def _reads_for(sequence: Sequence, prompt: Prompt) -> bool:
    """Whether it is about to read more of what `prompt` begins with, and that is worth a wait."""
    end = sequence.state.position + _WORTH_SHARING
    alike = len(prompt) > end and [*sequence.prompt.keys[:end]] == [*prompt.keys[:end]]
    return sequence.is_reading and alike


def make_rule(
    target: Target, state: State, sampler: Sampler, config: DecodeConfig, exact: bool
) -> AcceptanceRule:
    """The rule that the settings ask for, for one answer, under its constraint.

    exact: whether near-ties are decided as passes over one row decide them.
    """
    if state.constraint is not None:
        sampler = MaskedSampler(sampler, state.constraint)
    if exact:
        rule: AcceptanceRule = NearTieGuard(target, state, sampler, noise_of(target))
    else:
        rule = RejectionSampling(sampler) if config.draws_drafts else TargetSampling(sampler)
    return rule if config.logprobs is None else KeepLogits(rule)
