"""Draft, verify, accept, commit: one target pass over all sequences that are in the making."""

from __future__ import annotations

import sys
import time
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

import mlx.core as mx

from dflash_mlx.core.statistics import Observer
from dflash_mlx.engine.drafter import Proposal, Round, columns_of
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import noticed
from dflash_mlx.verifier.sequence import Rows

T = TypeVar("T")
Outcome = Round | None | Exception  # None: a prompt is not read whole yet
Found = tuple[mx.array, mx.array | None]  # logits, and what the drafter reads

NO_LIMIT = sys.maxsize  # rows of a step: what pays is the drafter's to say
_FORCED = (
    "The grammar of the answer, or its limit of thought, leaves no choice of these tokens, so "
    "nothing had to be drafted."
)


@dataclass(frozen=True)
class _Verify:
    """The part of a pass that verifies what was drafted for a sequence."""

    sequence: Sequence
    proposal: Proposal

    @cached_property
    def rows(self) -> Rows:
        state, tree = self.sequence.state, self.proposal.tree
        return Rows(tree.ids(state.anchor), state.cache, Block.of(tree))

    def commit(self, found: Found, shared: bool, observer: Observer) -> Round:
        state, ids, (logits, features) = self.sequence.state, self.rows.tokens, found
        verdict = Verdict(self.proposal, ids, logits, shared)
        accepted = self.sequence.accept(verdict)
        observer.mark("verify")
        state.commit(accepted, ids, features, self.proposal.forced)
        observer.mark("commit")
        return Round(self.proposal, accepted)


@dataclass(frozen=True)
class _Prefill:
    """The part of a pass that reads some of a sequence's prompt."""

    sequence: Sequence
    length: int  # tokens

    @cached_property
    def rows(self) -> Rows:
        prompt, state = self.sequence.prompt, self.sequence.state
        first, last = state.position, state.position + self.length
        embeddings = None
        if any(piece.embeddings for piece in prompt.pieces):  # else a salt, or a known prefix
            embeddings = self.sequence.target.embed(prompt, first, last)
        block = Block(self.length, last_only=not self.sequence.misses_logprobs)
        return Rows(mx.array(prompt.tokens[first:last]), state.cache, block, embeddings)

    def commit(self, found: Found, shared: bool, observer: Observer) -> Round | None:
        sequence, (logits, features) = self.sequence, found
        if sequence.misses_logprobs:
            sequence.read_logprobs(logits)
        sequence.state.commit_prompt(sequence.prompt, self.length, features)
        return None if sequence.is_reading else sequence.end_prompt(logits[-1:])


Part = _Verify | _Prefill  # of a pass


def step(target: Target, running: abc.Sequence[Sequence], observer: Observer) -> list[Outcome]:
    """A round of every sequence that decodes and a chunk of every prompt, in one target pass.

    The token of a round without drafts may still be on its way. A sequence that fails has its
    exception and leaves the others as they would be without it.
    """
    begin = time.perf_counter()
    by_kernels = target.kernels.begin_round()
    reading = [each for each in running if each.is_reading]
    decoding = [each for each in running if not each.is_reading]
    proposals = _proposed(target, decoding, by_kernels, observer)
    outcomes: dict[Sequence, Outcome] = {
        each: failed for each, failed in proposals.items() if isinstance(failed, Exception)
    }
    verify = [_Verify(e, p) for e, p in proposals.items() if not isinstance(p, Exception)]
    prefill = [_Prefill(each, each.next_chunk()) for each in reading]
    alone = [part for part in prefill if part.sequence.config.exact]
    joined: list[Part] = [*verify]
    joined += [part for part in prefill if not part.sequence.config.exact]

    trees = [part.proposal.tree for part in verify]
    asked = time.perf_counter()
    known = all(tree.is_known for tree in trees)
    if known and trees:  # before the pass is prepared, parts of which may run at once
        observer.mark("draft")
    passes = forward(target, joined, observer)
    passes += chain.from_iterable(forward(target, [part], observer) for part in alone)
    if not known:
        for tree in trees:
            guarded(tree.wait)  # what fails is told where the pass is committed
        observer.mark("draft")

    _compare(verify, bool(reading))
    failed: RuntimeError | None = None  # of the GPU, which is told once for all of a pass
    for part, found in zip([*joined, *alone], passes, strict=True):
        commit = partial(_committed, part, len(joined) > 1, observer)
        position, settled = part.sequence.state.position, part.sequence.state.settled
        outcome = commit(failed or found)
        nothing_kept = settled and part.sequence.state.position == position
        if by_kernels and isinstance(outcome, RuntimeError) and nothing_kept:
            again = _by_stock(part, commit, outcome)
            failed = None if isinstance(again, Exception) else outcome
            outcome = again
        outcomes[part.sequence] = outcome
    spent = time.perf_counter() - begin
    if by_kernels and verify and not reading:
        _watch(target, verify, time.perf_counter() - asked)
    for part in verify:
        if part.proposal.forced:
            part.sequence.state.paused += spent
    return [outcomes[each] for each in running]


def _proposed(
    target: Target, decoding: abc.Sequence[Sequence], by_kernels: bool, observer: Observer
) -> dict[Sequence, Proposal | Exception]:
    """A tree for each sequence: what its grammar forces, or what its drafter proposes.

    Where the GPU fails in drafts, they are made again without kernels.
    """
    forced = {each: guarded(partial(_forced, each.state)) for each in decoding}
    free = [each for each in decoding if forced[each] is None]
    found = {each: proposal for each, proposal in forced.items() if proposal is not None}
    rows = sum(len(each.tree) for each in found.values() if isinstance(each, Proposal))
    found |= _drafted(free, observer, rows)
    if not by_kernels:
        return found
    for each, proposal in found.items() if target.kernels.is_watched else ():
        if isinstance(proposal, Proposal):  # what is new is waited for
            why: Exception | None = guarded(proposal.tree.wait)
            found[each] = why or proposal
    failed = {each: why for each, why in found.items() if isinstance(why, RuntimeError)}
    with target.kernels.paused():
        again = _drafted([*failed], observer)
    for each, reason in failed.items():
        if not isinstance(again[each], Exception):  # they were at fault
            target.kernels.fail(reason)
    return found | again


def _compare(verify: abc.Sequence[_Verify], reading: bool) -> None:
    """Note whose pass had other rows beside its own than its drafter knew of."""
    rows = Counter[int]()
    for part in verify:
        rows[id(part.sequence.drafter)] += 0 if part.proposal.forced else len(part.proposal.tree)
    total = sum(len(part.proposal.tree) for part in verify)
    for part in verify:
        state, own = part.sequence.state, rows[id(part.sequence.drafter)]
        state.delayed = reading or total - own != state.beside


def _watch(target: Target, verify: abc.Sequence[_Verify], seconds: float) -> None:
    """Compare the time of a pass with what such passes take."""
    lengths = [part.sequence.state.position for part in verify]
    rows, times = sum(len(part.proposal.tree) for part in verify), target.pass_times
    expected = None if times is None else float(times.of(rows, lengths))
    waited = all(len(part.proposal.tree) > 1 for part in verify)  # else it may be on its way
    if target.kernels.end_round(rows, seconds, expected) and waited:
        noticed(target, rows, lengths, seconds)


def _committed(part: Part, shared: bool, observer: Observer, found: Found | Exception) -> Outcome:
    if isinstance(found, Exception):
        return found
    watched = part.sequence.target.kernels.is_watched

    def commit() -> Round | None:
        if watched:
            mx.eval(found[0])
        outcome = part.commit(found, shared, observer)
        if watched:
            part.sequence.state.settle()
        return outcome

    return guarded(commit)


def _by_stock(
    part: Part, commit: Callable[[Found | Exception], Outcome], failed: Exception
) -> Outcome:
    """Do one part of a failed pass again without kernels; if that goes well, they were at fault."""
    target = part.sequence.target
    part.rows.cache.discard()
    with target.kernels.paused():
        (found,) = forward(target, [part], Observer())
        outcome = commit(found)
    if not isinstance(outcome, Exception):
        target.kernels.fail(failed)
    return outcome


def guarded(action: Callable[[], T]) -> T | Exception:
    """The result of `action` or the exception that it raised, so that other sequences go on."""
    try:
        return action()
    except Exception as error:
        return error


def _forced(state: State) -> Proposal | None:
    """What the grammar leaves no choice of; a draft would have to begin with these tokens."""
    if state.constraint is None:
        return None
    tree = state.constraint.forced_tree(state.tokens, state.remaining - 1)
    return None if tree is None else Proposal(tree, why=lambda: _FORCED, forced=True)


def _drafted(
    decoding: abc.Sequence[Sequence], observer: Observer, forced: int = 0
) -> dict[Sequence, Proposal | Exception]:
    """forced: rows of the pass that grammars leave no choice of."""
    drafters = {id(each.drafter): each.drafter for each in decoding}
    found: dict[Sequence, Proposal | Exception] = {}
    for key, drafter in drafters.items():
        own = [each for each in decoding if id(each.drafter) == key]
        beside = [found.get(each) for each in decoding if each not in own]
        rows = sum(len(p.tree) if isinstance(p, Proposal) else 1 for p in beside)
        for each in own:
            each.state.beside = forced + rows
        proposals = guarded(partial(drafter.propose, [each.state for each in own], NO_LIMIT))
        if not isinstance(proposals, Exception):
            found.update(zip(own, proposals, strict=True))
        elif len(own) == 1:
            found[own[0]] = proposals
        else:
            observer.fell_back(proposals)
            for each in own:
                found.update(_drafted([each], observer))
    return found


def forward(
    target: Target, parts: abc.Sequence[Part], observer: Observer
) -> list[Found | Exception]:
    """Prepare, unevaluated, the pass over all parts; where it cannot be, one over each part."""
    if not parts:
        return []
    found = guarded(partial(_forward, target, parts))
    if not isinstance(found, Exception):
        return [*found]
    for part in parts:
        part.rows.cache.discard()
    if len(parts) == 1:
        return [found]
    observer.fell_back(found)
    return [*chain.from_iterable(forward(target, [part], observer) for part in parts)]


def _forward(target: Target, parts: abc.Sequence[Part]) -> list[Found]:
    own = [part.sequence.drafter.aux_layers for part in parts]
    aux_layers = own[0] if len({*own}) == 1 else tuple(sorted({*chain.from_iterable(own)}))
    passes = target.forward_all([part.rows for part in parts], aux_layers)
    return [
        (logits, columns_of(features, aux_layers, wanted))
        for (logits, features), wanted in zip(passes, own, strict=True)
    ]
