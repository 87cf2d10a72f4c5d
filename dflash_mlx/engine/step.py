"""Draft, verify, accept, commit: one target pass over all sequences that are in the making."""

from __future__ import annotations

import sys
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

import mlx.core as mx

from dflash_mlx.core.observer import Observer
from dflash_mlx.engine.drafter import Proposal, Round
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.sequence import Rows

T = TypeVar("T")
Found = tuple[mx.array, mx.array | None]  # logits, and what the drafter reads

NO_LIMIT = sys.maxsize  # rows of a step: what pays is the drafter's to say
_FORCED = (
    "The grammar of the answer leaves no choice of these tokens, so nothing had to be drafted."
)


@dataclass(frozen=True)
class _Verify:
    """The part of a pass that verifies what was drafted for a sequence."""

    sequence: Sequence
    proposal: Proposal
    is_apart = False

    @cached_property
    def rows(self) -> Rows:
        state, tree = self.sequence.state, self.proposal.tree
        return Rows(tree.ids(state.anchor), state.cache, Block.of(tree))

    def finish(
        self, found: Found | Exception, kernels: Kernels, shared: bool, observer: Observer
    ) -> Round:
        state, ids = self.sequence.state, self.rows.tokens
        logits, features = _or_raise(found)
        verdict = Verdict(self.proposal, ids, logits, features, kernels, shared)
        accepted = self.sequence.accept(verdict)
        observer.mark("verify")
        state.commit(accepted, verdict.ids, verdict.features, self.proposal.certain)
        observer.mark("commit")
        return Round(self.proposal, accepted)


@dataclass(frozen=True)
class _Prefill:
    """The part of a pass that reads some of a sequence's prompt."""

    sequence: Sequence
    target: Target
    length: int  # tokens

    @property
    def is_apart(self) -> bool:
        """Whether it has a pass of its own."""
        return self.sequence.exact

    @cached_property
    def rows(self) -> Rows:
        prompt, state = self.sequence.prompt, self.sequence.state
        first, last = state.position, state.position + self.length
        embeddings = None
        if prompt.pieces:
            embeddings = prompt.embed(self.target.embedding(), first, last)
        block = Block(self.length, last_only=True)
        return Rows(mx.array(prompt.tokens[first:last]), state.cache, block, embeddings)

    def finish(
        self, found: Found | Exception, kernels: Kernels, shared: bool, observer: Observer
    ) -> Round | None:
        sequence, state = self.sequence, self.sequence.state
        logits, features = _or_raise(found)
        state.commit_prompt(sequence.prompt, self.length, features)
        if sequence.is_reading:
            return None
        return sequence.end_prompt(logits[-1:])


def _or_raise(found: T | Exception) -> T:
    if isinstance(found, Exception):
        raise found
    return found


Outcome = Round | None | Exception  # None: a prompt is not read whole yet


def step(target: Target, running: abc.Sequence[Sequence], observer: Observer) -> list[Outcome]:
    """A round of every sequence that decodes and a chunk of every prompt, in one target pass.

    The first round of a sequence whose prompt was read takes no pass. The token of a round without
    drafts may still be on its way. A sequence that fails has its exception and leaves the others as
    they would be without it.
    """
    begin = time.perf_counter()
    outcomes: dict[Sequence, Outcome] = {e: guarded(e.open) for e in running if e.opens}
    passing = [each for each in running if each not in outcomes]
    parts: list[_Verify | _Prefill] = []
    decoding = [each for each in passing if not each.is_reading]
    for each, proposal in propose(decoding, observer):
        if isinstance(proposal, Exception):
            outcomes[each] = proposal
        else:
            parts.append(_Verify(each, proposal))
    trees = [part.proposal.tree for part in parts if isinstance(part, _Verify)]
    parts += [_Prefill(each, target, each.next_chunk()) for each in passing if each.is_reading]
    parts.sort(key=lambda part: part.is_apart)
    known = all(tree.is_known for tree in trees)
    if known and trees:  # before the pass is prepared, parts of which may run at once
        observer.mark("draft")
    joined = [part for part in parts if not part.is_apart]
    passes = forward(target, joined, observer)
    passes += [forward(target, [part], observer)[0] for part in parts[len(joined) :]]
    if not known:
        for tree in trees:
            tree.wait()
        observer.mark("draft")
    for each in decoding:
        each.state.delayed = len(decoding) < len(passing)
    for part, found in zip(parts, passes, strict=True):
        given = found, target.kernels, len(joined) > 1, observer
        finish: Callable[[], Round | None] = partial(part.finish, *given)
        outcomes[part.sequence] = guarded(finish)
        if isinstance(part, _Verify) and part.proposal.certain:
            part.sequence.state.paused += time.perf_counter() - begin
    return [outcomes[each] for each in running]


def alone(outcomes: abc.Sequence[Outcome]) -> Round | None:
    """Of a step of one sequence, which raises what went wrong."""
    (outcome,) = outcomes
    return _or_raise(outcome)


def guarded(action: Callable[[], T]) -> T | Exception:
    """What it returns, or why it fails: whatever that is, other sequences go on."""
    try:
        return action()
    except Exception as error:
        return error


def propose(
    decoding: abc.Sequence[Sequence], observer: Observer
) -> list[tuple[Sequence, Proposal | Exception]]:
    """A tree for each sequence: what its grammar forces, or what its drafter proposes."""
    found: list[tuple[Sequence, Proposal | Exception]] = []
    free = []
    for each in decoding:
        proposal = guarded(partial(_certain, each.state))
        if proposal is None:
            free.append(each)
        else:
            found.append((each, proposal))
    return found + _drafted(free, observer)


def _certain(state: State) -> Proposal | None:
    """The tokens that the grammar leaves no choice of; None where there is one.

    No draft model is asked: what it proposed would have to begin with these tokens.
    """
    if state.constraint is None:
        return None
    tree = state.constraint.certain(state.tokens, state.remaining - 1)
    return None if tree is None else Proposal(tree, why=lambda: _FORCED, certain=True)


def _drafted(
    decoding: abc.Sequence[Sequence], observer: Observer
) -> list[tuple[Sequence, Proposal | Exception]]:
    """A tree for each sequence, drafter by drafter: one drafts for all of its own at once."""
    drafters = {id(each.drafter): each.drafter for each in decoding}
    found: list[tuple[Sequence, Proposal | Exception]] = []
    for key, drafter in drafters.items():
        own = [each for each in decoding if id(each.drafter) == key]
        proposals = guarded(partial(drafter.propose, [each.state for each in own], NO_LIMIT))
        if not isinstance(proposals, Exception):
            found += zip(own, proposals, strict=True)
        elif len(own) == 1:
            found.append((own[0], proposals))
        else:
            observer.fell_back(proposals)
            found += chain.from_iterable(_drafted([each], observer) for each in own)
    return found


def forward(
    target: Target, parts: abc.Sequence[_Verify | _Prefill], observer: Observer
) -> list[Found | Exception]:
    """Prepare the pass over all parts; where it cannot be, one over each part.

    Nothing is evaluated yet, so that this can be done while a draft is still running.
    """
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


def _forward(target: Target, parts: abc.Sequence[_Verify | _Prefill]) -> list[Found]:
    own = [part.sequence.drafter.aux_layers for part in parts]
    aux_layers = own[0] if len({*own}) == 1 else tuple(sorted({*chain.from_iterable(own)}))
    passes = target.forward_all([part.rows for part in parts], aux_layers)
    return [
        (logits, _columns(features, aux_layers, wanted))
        for (logits, features), wanted in zip(passes, own, strict=True)
    ]


def _columns(
    features: mx.array | None, aux_layers: tuple[int, ...], wanted: tuple[int, ...]
) -> mx.array | None:
    """Of features [N, m*d] the columns of the layers that one drafter reads."""
    if features is None or wanted == aux_layers:
        return features
    if not wanted:
        return None
    layers = mx.split(features, len(aux_layers), axis=-1)
    return mx.concatenate([layers[aux_layers.index(tap)] for tap in wanted], axis=-1)
