"""Draft, verify, accept, commit: one target pass over all sequences that are in the making."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.rules import Rule
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict
from dflash_mlx.target.block import Block
from dflash_mlx.target.forest import Rows
from dflash_mlx.target.model import Target

NO_LIMIT = sys.maxsize  # rows of a step: what pays is the drafter's to say


@dataclass(frozen=True)
class Round:
    """What was proposed for one sequence, and what the target accepted of it."""

    proposal: Proposal
    accepted: Accepted


@dataclass
class Running:
    """A sequence in the making: its prompt is read, then its answer is decoded.

    prompt: its tokens, () where the caches hold it. chunk: most of them that a pass reads. rule:
    how drafts are accepted; None where nothing but the prompt is asked for.
    """

    state: State
    drafter: Drafter
    prompt: Sequence[int] = ()
    chunk: int = sys.maxsize
    rule: Rule | None = None

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
        end = min(first + self.chunk, last)
        tail = last - min(rows + 1, self.chunk) if rows else last
        return list(self.prompt[first : tail if first < tail < end else end])

    def open(self) -> Round:
        """The token after the prompt, as a round that drafts nothing and takes no pass."""
        assert self.rule is not None
        state, nothing = self.state, Proposal(Tree.chain())
        first = self.rule.accept(Verdict(nothing, state.anchor, state.opening, None), state)
        state.begin(first)
        return Round(nothing, first)


@dataclass(frozen=True)
class _Tree:
    """The part of a pass that verifies what was drafted for a sequence."""

    sequence: Running
    proposal: Proposal

    @cached_property
    def rows(self) -> Rows:
        state, tree = self.sequence.state, self.proposal.tree
        return Rows(tree.ids(state.anchor), state.cache, Block.of(tree))

    def finish(
        self, logits: mx.array, features: mx.array | None, target: Target, observer: Observer
    ) -> Round:
        state, rule = self.sequence.state, self.sequence.rule
        assert rule is not None
        verdict = Verdict(self.proposal, self.rows.tokens, logits, features, target.kernels)
        accepted = rule.accept(verdict, state)
        observer.mark("verify")
        state.commit(accepted, verdict.ids, verdict.features)
        observer.mark("commit")
        return Round(self.proposal, accepted)


@dataclass(frozen=True)
class _Chunk:
    """The part of a pass that reads some of a sequence's prompt."""

    sequence: Running
    tokens: list[int]

    @cached_property
    def rows(self) -> Rows:
        block = Block(len(self.tokens), last_only=True)
        return Rows(mx.array(self.tokens), self.sequence.state.cache, block)

    def finish(
        self, logits: mx.array, features: mx.array | None, target: Target, observer: Observer
    ) -> Round | None:
        sequence, state = self.sequence, self.sequence.state
        state.commit_prompt(self.tokens, features)
        if sequence.is_reading:
            return None
        state.end_prompt(logits[-1:])
        return None if sequence.rule is None else sequence.open()


def step(target: Target, running: Sequence[Running], observer: Observer) -> list[Round | None]:
    """A round of every sequence that decodes and a chunk of every prompt, in one target pass.

    None for prompts that are not read whole yet. The first round of a sequence whose prompt was
    read takes no pass. The token of a round without drafts may still be on its way.
    """
    rounds: dict[int, Round | None] = {id(each): each.open() for each in running if each.opens}
    passing = [each for each in running if id(each) not in rounds]
    reading = [_Chunk(each, each.next_chunk()) for each in passing if each.is_reading]
    drafted = [_Tree(*both) for both in propose([each for each in passing if not each.is_reading])]
    known = all(tree.proposal.tree.is_known for tree in drafted)
    if known:  # before the pass is prepared, parts of which may run at once
        observer.mark("draft")
    parts: list[_Tree | _Chunk] = [*drafted, *reading]
    passes = _forward(target, parts)
    if not known:
        for tree in drafted:
            tree.proposal.tree.wait()
        observer.mark("draft")
    for part, found in zip(parts, passes, strict=True):
        rounds[id(part.sequence)] = part.finish(*found, target, observer)
    return [rounds[id(each)] for each in running]


def propose(decoding: Sequence[Running]) -> list[tuple[Running, Proposal]]:
    """A tree for each sequence, drafter by drafter: one drafts for all of its own at once."""
    drafters = {id(each.drafter): each.drafter for each in decoding}
    found: list[tuple[Running, Proposal]] = []
    for key, drafter in drafters.items():
        own = [each for each in decoding if id(each.drafter) == key]
        proposals = drafter.propose([each.state for each in own], NO_LIMIT)
        found += zip(own, proposals, strict=True)
    return found


def _forward(
    target: Target, parts: Sequence[_Tree | _Chunk]
) -> list[tuple[mx.array, mx.array | None]]:
    """Prepare the pass over all parts; of each its logits and what its drafter taps.

    Nothing is evaluated yet, so that this can be done while a draft is still running.
    """
    if not parts:
        return []
    own = [part.sequence.drafter.taps for part in parts]
    taps = own[0] if len({*own}) == 1 else tuple(sorted({*chain.from_iterable(own)}))
    passes = target.forward_all([part.rows for part in parts], taps)
    return [
        (logits, _columns(features, taps, wanted))
        for (logits, features), wanted in zip(passes, own, strict=True)
    ]


def _columns(
    features: mx.array | None, taps: tuple[int, ...], wanted: tuple[int, ...]
) -> mx.array | None:
    """Of features [N, m*d] the columns of the layers that one drafter reads."""
    if features is None or wanted == taps:
        return features
    if not wanted:
        return None
    layers = mx.split(features, len(taps), axis=-1)
    return mx.concatenate([layers[taps.index(tap)] for tap in wanted], axis=-1)
