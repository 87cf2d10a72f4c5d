"""The decode loop: draft, verify, accept, commit, yield."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.exact import NearTieGuard, noise_of
from dflash_mlx.engine.reject import Reject
from dflash_mlx.engine.rules import Match, Rule
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import verify
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target


def prefill(
    target: Target,
    drafter: Drafter,
    state: State,
    prompt: list[int],
    config: DecodeConfig,
    observer: Observer,
) -> int:
    """Bring the caches up to the last token of `prompt`, which becomes the anchor.

    A prefix of `prompt` that the state holds already is kept; returns its length.
    """
    reused = state.reuse(prompt)
    observer.prefilled(reused, len(prompt) - 1)
    while state.position < len(prompt) - 1:
        end = _chunk_end(state, len(prompt) - 1, config.prefill_step)
        chunk = prompt[state.position : end]
        block = Block(len(chunk))
        _, features = target.forward(mx.array(chunk), state.cache, block, drafter.taps)
        state.commit_prompt(chunk, features)
        observer.prefilled(end, len(prompt) - 1)
    state.set_anchor(prompt[-1])
    return reused


def _chunk_end(state: State, last: int, step: int) -> int:
    """Where the next pass over a prompt ends: before its tail, where that is passed by itself."""
    end, tail = min(state.position + step, last), last - min(state.cache.tail, step)
    return tail if state.position < tail < end else end


def decode(
    target: Target, drafter: Drafter, state: State, config: DecodeConfig, observer: Observer
) -> Iterator[Accepted]:
    """Yield rounds until `max_tokens` tokens are out or the context is full.

    Every token is the target's own choice (see `accept`). A round is committed before it is
    yielded, so the state stays usable wherever the caller stops.
    """
    sampler = Sampler(config.sampling)
    ahead = (lambda: 0) if sampler.needs_history else (lambda: drafter.rounds_ahead)
    end = min(state.position + config.max_tokens, target.context_length - 1)
    rule = make_rule(target, state, sampler, config)
    return _read_behind(_rounds(target, drafter, state, rule, end, observer), ahead, observer)


def make_rule(target: Target, state: State, sampler: Sampler, config: DecodeConfig) -> Rule:
    """The acceptance rule that the settings ask for, for one answer."""
    if config.guarded:
        return NearTieGuard(target, state, sampler, noise_of(target))
    return Reject(sampler) if config.draws_drafts else Match(sampler)


def _rounds(
    target: Target, drafter: Drafter, state: State, rule: Rule, end: int, observer: Observer
) -> Iterator[Accepted]:
    """The loop itself; the token of a round without drafts may still be running when yielded."""
    observer.start()
    while state.position < end:
        tree = drafter.propose(state, room=end - state.position)
        verdict = verify(target, state, tree, drafter.taps)
        tree.wait()
        observer.mark("draft")
        accepted = rule.accept(verdict, state)
        observer.mark("verify")
        state.commit(accepted, verdict.features)
        observer.mark("commit")
        yield accepted


def _read_behind(
    rounds: Iterator[Accepted], ahead: Callable[[], int], observer: Observer
) -> Iterator[Accepted]:
    """Yield finished rounds, while the next `ahead()` of them are already running."""
    running: deque[Accepted] = deque()
    for accepted in rounds:
        running.append(accepted)
        while len(running) > ahead():
            yield _finished(running.popleft(), observer)
            observer.mark("yield")
    for accepted in running:
        yield _finished(accepted, observer)


def _finished(accepted: Accepted, observer: Observer) -> Accepted:
    """Wait for a target pass that nothing had to wait for before."""
    accepted.wait()
    observer.mark("verify")
    return accepted
