"""Draft, verify, accept, commit: one target pass over all sequences that are in the making."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeVar

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.acceptance import AcceptanceRule
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.forest import Rows
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.routing import Kernels

T = TypeVar("T")
Found = tuple[mx.array, mx.array | None]  # logits, and what the drafter reads

NO_LIMIT = sys.maxsize  # rows of a step: what pays is the drafter's to say
_FORCED = (
    "The grammar of the answer leaves no choice of these tokens, so nothing had to be drafted."
)


@dataclass(frozen=True)
class Round:
    """What was proposed for one sequence, and what the target accepted of it."""

    proposal: Proposal
    accepted: Accepted


@dataclass(eq=False)
class Running:
    """A sequence in the making: its prompt is read, then its answer is decoded.

    prompt: its tokens, () where the caches hold it. chunk: most of them that a pass reads. rule:
    how drafts are accepted; made by `make_rule` behind the prompt, which `exact` has to know.
    Without either nothing but the prompt is asked for. allowed: most of the prompt's tokens that
    the next pass reads. exact: whether its prompt is read by the passes that would read it alone,
    since the keys and values of others differ in the last bits. reused: tokens of the prompt that
    another has read, none where exact. has_looked: whether it had the chance to. took: bytes when
    its caches had to be dropped.
    """

    state: State
    drafter: Drafter
    prompt: Sequence[int] = ()
    chunk: int = sys.maxsize
    rule: AcceptanceRule | None = None
    make_rule: Callable[[], AcceptanceRule] | None = None
    allowed: int = sys.maxsize
    exact: bool = False
    reused: int = 0
    has_looked: bool = False
    took: int = 0
    _left_at: Accepted | None = None  # the newest token, where the caches were dropped behind it

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.state.position < len(self.prompt)

    @property
    def opens(self) -> bool:
        """Whether the prompt is read, and the answer has no token yet."""
        return not self.is_reading and not self.state.has_begun

    def next_chunk(self) -> list[int]:
        """What the next pass reads: up to the prompt's tail, where that is passed by itself."""
        first, last, rows = self.state.position, len(self.prompt), self.state.cache.tail
        chunk = self.chunk if self.exact else min(self.chunk, self.allowed)
        end = min(first + chunk, last)
        tail = last - min(rows + 1, chunk) if rows else last
        return list(self.prompt[first : tail if first < tail < end else end])

    def restore_from(self, other: State) -> None:
        """Reuse what another sequence has read; `other` is then of no more use."""
        self.has_looked, length = True, other.reuse(self.prompt)
        self.state.restore_from(other)
        if self._left_at is None:
            self.reused = length

    def drop(self, target: Target) -> None:
        """Give up all caches; what they held is read again, as a prompt."""
        if self.state.has_begun:
            *self.prompt, newest = self.state.tokens
            self._left_at = Accepted(Tree.chain(), (0,), newest)
        self.state.restart(target.new_cache(), self.drafter.new_context())
        self.has_looked = False

    def end_prompt(self, logits: mx.array) -> Round | None:
        """Take in the logits after a prompt; an answer that had begun goes on where it was."""
        self.state.end_prompt(logits)
        if self._left_at is None:
            return self.open() if self.rule or self.make_rule else None
        self.state.begin(self._left_at)
        self._left_at = None
        return None

    def open(self) -> Round:
        """The token after the prompt, as a round that drafts nothing and takes no pass."""
        if self.rule is None:
            assert self.make_rule is not None
            self.rule = self.make_rule()
        state, nothing = self.state, Proposal(Tree.chain())
        first = self.accept(Verdict(nothing, state.anchor, state.opening, None))
        state.begin(first)
        return Round(nothing, first)

    def accept(self, verdict: Verdict) -> Accepted:
        """What the rule accepts, up to where the grammar of the answer ends."""
        assert self.rule is not None
        accepted, constraint = self.rule.accept(verdict, self.state), self.state.constraint
        return accepted if constraint is None else constraint.end(accepted, self.state.tokens)


@dataclass(frozen=True)
class _Tree:
    """The part of a pass that verifies what was drafted for a sequence."""

    sequence: Running
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
class _Chunk:
    """The part of a pass that reads some of a sequence's prompt."""

    sequence: Running
    tokens: list[int]

    @property
    def is_apart(self) -> bool:
        """Whether it has a pass of its own."""
        return self.sequence.exact

    @cached_property
    def rows(self) -> Rows:
        block = Block(len(self.tokens), last_only=True)
        return Rows(mx.array(self.tokens), self.sequence.state.cache, block)

    def finish(
        self, found: Found | Exception, kernels: Kernels, shared: bool, observer: Observer
    ) -> Round | None:
        sequence, state = self.sequence, self.sequence.state
        logits, features = _or_raise(found)
        state.commit_prompt(self.tokens, features)
        if sequence.is_reading:
            return None
        return sequence.end_prompt(logits[-1:])


def _or_raise(found: T | Exception) -> T:
    if isinstance(found, Exception):
        raise found
    return found


Outcome = Round | None | Exception  # None: a prompt is not read whole yet


def step(target: Target, running: Sequence[Running], observer: Observer) -> list[Outcome]:
    """A round of every sequence that decodes and a chunk of every prompt, in one target pass.

    The first round of a sequence whose prompt was read takes no pass. The token of a round without
    drafts may still be on its way. A sequence that fails has its exception and leaves the others as
    they would be without it.
    """
    begin = time.perf_counter()
    outcomes: dict[Running, Outcome] = {e: _guarded(e.open) for e in running if e.opens}
    passing = [each for each in running if each not in outcomes]
    parts: list[_Tree | _Chunk] = []
    decoding = [each for each in passing if not each.is_reading]
    for each, proposal in propose(decoding, observer):
        if isinstance(proposal, Exception):
            outcomes[each] = proposal
        else:
            parts.append(_Tree(each, proposal))
    trees = [part.proposal.tree for part in parts if isinstance(part, _Tree)]
    parts += [_Chunk(each, each.next_chunk()) for each in passing if each.is_reading]
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
        outcomes[part.sequence] = _guarded(finish)
        if isinstance(part, _Tree) and part.proposal.certain:
            part.sequence.state.paused += time.perf_counter() - begin
    return [outcomes[each] for each in running]


def alone(outcomes: Sequence[Outcome]) -> Round | None:
    """Of a step of one sequence, which raises what went wrong."""
    (outcome,) = outcomes
    return _or_raise(outcome)


def _guarded(action: Callable[[], T]) -> T | Exception:
    """What it returns, or why it fails: whatever that is, other sequences go on."""
    try:
        return action()
    except Exception as error:
        return error


def propose(
    decoding: Sequence[Running], observer: Observer
) -> list[tuple[Running, Proposal | Exception]]:
    """A tree for each sequence: what its grammar forces, or what its drafter proposes."""
    found: list[tuple[Running, Proposal | Exception]] = []
    free = []
    for each in decoding:
        proposal = _guarded(partial(_certain, each.state))
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
    decoding: Sequence[Running], observer: Observer
) -> list[tuple[Running, Proposal | Exception]]:
    """A tree for each sequence, drafter by drafter: one drafts for all of its own at once."""
    drafters = {id(each.drafter): each.drafter for each in decoding}
    found: list[tuple[Running, Proposal | Exception]] = []
    for key, drafter in drafters.items():
        own = [each for each in decoding if id(each.drafter) == key]
        proposals = _guarded(partial(drafter.propose, [each.state for each in own], NO_LIMIT))
        if not isinstance(proposals, Exception):
            found += zip(own, proposals, strict=True)
        elif len(own) == 1:
            found.append((own[0], proposals))
        else:
            observer.fell_back(proposals)
            found += chain.from_iterable(_drafted([each], observer) for each in own)
    return found


def forward(
    target: Target, parts: Sequence[_Tree | _Chunk], observer: Observer
) -> list[Found | Exception]:
    """Prepare the pass over all parts; where it cannot be, one over each part.

    Nothing is evaluated yet, so that this can be done while a draft is still running.
    """
    if not parts:
        return []
    found = _guarded(partial(_forward, target, parts))
    if not isinstance(found, Exception):
        return [*found]
    for part in parts:
        part.rows.cache.discard()
    if len(parts) == 1:
        return [found]
    observer.fell_back(found)
    return [*chain.from_iterable(forward(target, [part], observer) for part in parts)]


def _forward(target: Target, parts: Sequence[_Tree | _Chunk]) -> list[Found]:
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
