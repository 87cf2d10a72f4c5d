"""The decode loop for one conversation: a loop over `step`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.engine.acceptance import (
    AcceptanceRule,
    KeepLogits,
    RejectionSampling,
    TargetSampling,
)
from dflash_mlx.engine.constraint import Constraint, MaskedSampler
from dflash_mlx.engine.drafter import Drafter
from dflash_mlx.engine.exact import NearTieGuard, noise_of
from dflash_mlx.engine.state import State
from dflash_mlx.engine.step import Round, Running, alone, step
from dflash_mlx.verifier.model import Target


def answer(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    config: DecodeConfig,
    observer: Observer | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Round]:
    """Decode behind the tokens of `prompt`, at least one, with caches of its own.

    The shortest way from ids to ids; `session.stream` has texts, stops and conversations.
    """
    observer = observer or Observer()
    state = State(target.new_cache(), drafter.new_context())
    state.constraint = constraint
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
    running = Running(state, drafter, prompt, chunk=config.prefill_step)
    while running.is_reading:
        alone(step(target, [running], observer))
        observer.prefilled(state.position, len(prompt))
    return reused


def decode(
    target: Target, drafter: Drafter, state: State, config: DecodeConfig, observer: Observer
) -> Iterator[Round]:
    """Yield rounds until `max_tokens` tokens are out, the context is full or the grammar ends.

    The first is the target's token after the prompt, which takes no further pass. Every token is
    the target's own choice (see `accept`). A round is committed before it is yielded, so the state
    stays usable wherever the caller stops.
    """
    observer.start()
    sampler = Sampler(config.sampling)
    reads = sampler.needs_history or state.constraint is not None
    ahead = (lambda: 0) if reads else (lambda: drafter.rounds_ahead)
    last = state.next_position - 1 + config.max_tokens
    state.end = min(last, target.context_length - 1)
    running = Running(state, drafter, rule=make_rule(target, state, sampler, config))
    return _read_behind(_rounds(target, running, observer), ahead, state, observer)


def make_rule(
    target: Target, state: State, sampler: Sampler, config: DecodeConfig, company: bool = False
) -> AcceptanceRule:
    """The acceptance rule that the settings ask for, for one answer, under its constraint.

    company: whether others may be in its passes; then plain decoding has ties to decide, too.
    """
    if state.constraint is not None:
        sampler = MaskedSampler(sampler, state.constraint)
    if config.guarded or (config.exact and company):
        rule: AcceptanceRule = NearTieGuard(target, state, sampler, noise_of(target))
    else:
        rule = RejectionSampling(sampler) if config.draws_drafts else TargetSampling(sampler)
    return KeepLogits(rule) if config.logprobs else rule


def _rounds(target: Target, running: Running, observer: Observer) -> Iterator[Round]:
    """The loop itself; the first round takes no pass."""
    state = running.state
    while not state.has_begun or state.remaining > 0:
        round_ = alone(step(target, [running], observer))
        assert round_ is not None  # the prompt is read
        yield round_


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
