"""The decode loop: draft, verify, accept, commit, yield."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.drafter import Drafter, Proposal
from dflash_mlx.engine.exact import NearTieGuard, noise_of
from dflash_mlx.engine.rules import Match, Reject, Rule
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import Verdict, verify
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target

NO_LIMIT = sys.maxsize  # rows of a step: what pays is the drafter's to say


@dataclass(frozen=True)
class Running:
    """A sequence that is being decoded, and how its drafts are accepted."""

    state: State
    rule: Rule


@dataclass(frozen=True)
class Round:
    """What was proposed for one sequence, and what the target accepted of it."""

    proposal: Proposal
    accepted: Accepted


def answer(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    config: DecodeConfig,
    observer: Observer | None = None,
) -> Iterator[Round]:
    """Decode behind the tokens of `prompt`, at least one, with caches of its own.

    The shortest way from ids to ids; `session.stream` has texts, stops and conversations.
    """
    observer = observer or Observer()
    state = State(target.new_cache(), drafter.new_context())
    prefill(target, drafter, state, list(prompt), config, observer)
    yield from decode(target, drafter, state, config, observer)


def prefill(
    target: Target,
    drafter: Drafter,
    state: State,
    prompt: list[int],
    config: DecodeConfig,
    observer: Observer,
) -> int:
    """Bring the caches up to the end of `prompt`.

    A prefix of `prompt` that the state holds already is kept, its last token excepted; returns its
    length.
    """
    reused = state.reuse(prompt)
    observer.prefilled(reused, len(prompt))
    while state.position < len(prompt):
        end = _chunk_end(state, len(prompt), config.prefill_step)
        chunk = prompt[state.position : end]
        block = Block(len(chunk), last_only=True)
        logits, features = target.forward(mx.array(chunk), state.cache, block, drafter.taps)
        state.commit_prompt(chunk, features)
        observer.prefilled(end, len(prompt))
    state.end_prompt(logits[-1:])
    return reused


def _chunk_end(state: State, last: int, step: int) -> int:
    """Where the next pass over a prompt ends: before its tail, where that is passed by itself."""
    end, rows = min(state.position + step, last), state.cache.tail
    tail = last - min(rows + 1, step) if rows else last
    return tail if state.position < tail < end else end


def decode(
    target: Target, drafter: Drafter, state: State, config: DecodeConfig, observer: Observer
) -> Iterator[Round]:
    """Yield rounds until `max_tokens` tokens are out or the context is full.

    The first is the target's token after the prompt, which takes no further pass. Every token is
    the target's own choice (see `accept`). A round is committed before it is yielded, so the state
    stays usable wherever the caller stops.
    """
    observer.start()
    sampler = Sampler(config.sampling)
    ahead = (lambda: 0) if sampler.needs_history else (lambda: drafter.rounds_ahead)
    state.end = min(state.position - 1 + config.max_tokens, target.context_length - 1)
    running = Running(state, make_rule(target, state, sampler, config))
    rounds = _rounds(target, drafter, running, observer)
    return _read_behind(chain([_opening(running)], rounds), ahead, state, observer)


def _opening(running: Running) -> Round:
    """The token after the prompt, as a round that drafts nothing."""
    state, nothing = running.state, Proposal(Tree.chain())
    verdict = Verdict(nothing, state.anchor, state.opening, None)
    first = running.rule.accept(verdict, state)
    state.begin(first)
    return Round(nothing, first)


def make_rule(target: Target, state: State, sampler: Sampler, config: DecodeConfig) -> Rule:
    """The acceptance rule that the settings ask for, for one answer."""
    if config.guarded:
        return NearTieGuard(target, state, sampler, noise_of(target))
    return Reject(sampler) if config.draws_drafts else Match(sampler)


def step(
    target: Target, drafter: Drafter, running: Sequence[Running], observer: Observer
) -> list[Round]:
    """One round of every sequence; the token of one without drafts may still be on its way."""
    states = [sequence.state for sequence in running]
    proposals = drafter.propose(states, NO_LIMIT)
    known = all(proposal.tree.is_known for proposal in proposals)
    if known:  # before the pass is prepared, parts of which may run at once
        observer.mark("draft")
    verdicts = verify(target, states, proposals, drafter.taps)
    if not known:
        for proposal in proposals:
            proposal.tree.wait()
        observer.mark("draft")
    pairs = list(zip(running, verdicts, strict=True))
    accepted = [sequence.rule.accept(verdict, sequence.state) for sequence, verdict in pairs]
    observer.mark("verify")
    for (sequence, verdict), kept in zip(pairs, accepted, strict=True):
        sequence.state.commit(kept, verdict.ids, verdict.features)
    observer.mark("commit")
    return [Round(*both) for both in zip(proposals, accepted, strict=True)]


def _rounds(
    target: Target, drafter: Drafter, running: Running, observer: Observer
) -> Iterator[Round]:
    """The loop itself, for one sequence."""
    while running.state.room > 0:
        yield from step(target, drafter, [running], observer)


def _read_behind(
    rounds: Iterator[Round], ahead: Callable[[], int], state: State, observer: Observer
) -> Iterator[Round]:
    """Yield finished rounds, while the next `ahead()` of them are already running."""
    running: deque[Round] = deque()
    for round_ in rounds:
        running.append(round_)
        while len(running) > ahead():
            finished = _finished(running.popleft(), observer)
            begin = time.perf_counter()
            yield finished
            state.paused += time.perf_counter() - begin
            observer.mark("yield")
    for round_ in running:
        yield _finished(round_, observer)


def _finished(round_: Round, observer: Observer) -> Round:
    """Wait for a target pass that nothing had to wait for before."""
    round_.accepted.wait()
    observer.mark("verify")
    return round_
