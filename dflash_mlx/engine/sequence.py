"""One request on its way: its prompt is read, then its answer is decoded."""

from __future__ import annotations

import sys
import time
from collections import abc, deque
from dataclasses import replace
from enum import Enum
from typing import Any

import mlx.core as mx

from dflash_mlx.core.config import PLAIN, DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import require
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import Accepted, Tree, rows_on
from dflash_mlx.engine.delta import Delta, StopText, TokenLogprobs, logprobs_of, opens_thought
from dflash_mlx.engine.drafter import Drafter, Proposal, Round
from dflash_mlx.engine.exact import NearTieGuard, noise_of
from dflash_mlx.engine.grammar import Constraint, Grammars, MaskedSampler
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.engine.thoughts import ThoughtLimit
from dflash_mlx.engine.verify import RejectionSampling, TargetSampling, Verdict
from dflash_mlx.verifier.model import Target

_LOGPROB_ROWS = 128  # rows of logits at a time, as each may be a megabyte


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # for a place among those that run
    PREFILL = "prefill"  # its prompt is read
    DECODE = "decode"
    PREEMPTED = "preempted"  # its caches were given up; it waits, and is read again
    FINISHED = "finished"


class Sequence:
    """A prompt, what was read and decoded of it, and the answer so far."""

    def __init__(
        self, pair: Pair, state: State, drafter: Drafter, prompt: Prompt, config: DecodeConfig
    ) -> None:
        self.state, self.drafter, self.prompt, self.config = state, drafter, prompt, config
        self.target = pair.target
        ends = config.sampling.ends(pair.tokenizer.eos_token_ids)
        sampler = Sampler(config.sampling, len(prompt), ends)
        self.rule = acceptance_rule(pair.target, state, config, sampler)
        # Reads the answer, looks for its end.
        self.text = StopText(pair.tokenizer, config.stop, ends, config.sampling.min_tokens)
        self.status = Status.WAITING
        self.chunk_limit = sys.maxsize  # prompt tokens in the next pass, at most; 0: it waits
        self.looked_for_prefix = False  # that another has read
        self.preempted_nbytes = 0  # of its caches when they were given up
        self.rounds: deque[Round] = deque()  # done, or running, and not read yet
        self.finish_reason: str | None = None
        self.statistics = Statistics(drafter.name, prompt_tokens=len(prompt))
        # Of the prompt's tokens so far, where they are asked for; they outlive a preemption.
        asked = config.prompt_logprobs is not None
        self.prompt_logprobs = [TokenLogprobs(prompt.tokens[0], None, ())] if asked else []
        self._preempted_at: Accepted | None = None  # the newest token, where it was preempted
        self._anchor = prompt.tokens[-1] if len(prompt) else 0
        self._plain_seconds = 0.0  # of a round of plain decoding, from the last that knew
        self.start_clock()

    @property
    def is_reading(self) -> bool:
        return self.state.position < len(self.prompt.tokens)

    @property
    def misses_logprobs(self) -> bool:
        """Whether it has to read its prompt itself, as caches do not have what is asked for."""
        return 0 < len(self.prompt_logprobs) < self.statistics.prompt_tokens

    @property
    def is_full(self) -> bool:
        return self.state.has_begun and self.state.remaining <= 0

    @property
    def length(self) -> int:
        """Tokens of the conversation, the answer included."""
        return self.statistics.prompt_tokens + self.statistics.generated_tokens

    @property
    def rounds_ahead(self) -> int:
        return 0 if self.rule.needs_history else self.drafter.rounds_ahead

    def next_chunk(self) -> int:
        """Prompt tokens that the next pass reads: up to the tail, where that is a pass of its own.

        A recurrent state can go back to where the pass over the tail began.
        """
        first, last, rows = self.state.position, len(self.prompt), self.state.cache.tail
        step = self.config.prefill_step
        limit = min(self.chunk_limit, _LOGPROB_ROWS) if self.misses_logprobs else self.chunk_limit
        most = step if self.config.exact else min(step, limit)
        end = min(first + most, last)
        tail = last - min(rows + 1, most) if rows else last
        return self.prompt.uncut(tail if first < tail < end else end) - first

    def restore_from(self, other: State) -> None:
        """Reuse what another sequence has read; `other` is then of no more use."""
        length = other.reuse(self.prompt)
        self.state.restore_from(other)
        if self._preempted_at is None:
            self.statistics.reused_tokens = length

    def preempt(self) -> None:
        """Give up all caches; what they held is read again, as a prompt."""
        self.status, self.preempted_nbytes = Status.PREEMPTED, self.state.nbytes
        if self.state.has_begun:
            *tokens, newest = self.state.tokens
            self.prompt = Prompt(tuple(tokens), self.prompt.pieces)
            self._preempted_at = Accepted(Tree.chain(), (0,), newest)
        self.state.restore_from(State(self.target.new_cache(), self.drafter.new_context()))
        self.looked_for_prefix = False

    def read_logprobs(self, logits: mx.array) -> None:
        """Take in logits [n, V] after the next n tokens of the prompt."""
        told, first, tokens = self.prompt_logprobs, self.state.position + 1, self.prompt.tokens
        end = min(first + len(logits), self.statistics.prompt_tokens)
        for begin in range(len(told), end, _LOGPROB_ROWS):
            some = tokens[begin : min(begin + _LOGPROB_ROWS, end)]
            told += logprobs_of(some, logits[begin - first :], self.config.prompt_logprobs or 0)

    def end_prompt(self, logits: mx.array) -> Round | None:
        """Take in the logits [1, V] after a prompt; the first token is a round without a pass."""
        self.state.end_prompt(logits)
        self.status = Status.DECODE
        if self._preempted_at is not None:
            self.state.begin(self._preempted_at)
            self._preempted_at = None
            return None
        self.resume()
        self.statistics.prefill_seconds = self._resumed - self._begin
        nothing = Proposal(Tree.chain())
        first = self.accept(Verdict(nothing, self.state.anchor, logits))
        self.state.begin(first)
        return Round(nothing, first)

    def accept(self, verdict: Verdict) -> Accepted:
        """What the rule accepts, up to where the grammar of the answer ends."""
        accepted, constraint = self.rule.accept(verdict, self.state), self.state.constraint
        if self.config.logprobs is not None:
            accepted = replace(accepted, logits=verdict.logits[rows_on(accepted.path)])
        return accepted if constraint is None else constraint.end(accepted, self.state.tokens)

    def next_delta(self) -> Delta:
        """What the oldest unread round adds; tokens behind a stop are left out. Waits for it."""
        round_, text = self.rounds.popleft(), self.text
        accepted = round_.accepted
        kept = () if self.config.reads_only else text.take(accepted.tokens)
        of_prompt = () if self.statistics.generated_tokens else tuple(self.prompt_logprobs)
        self._count(round_, len(kept))
        anchor, self._anchor = self._anchor, kept[-1] if kept else self._anchor
        ended = accepted.ends and kept == accepted.tokens
        self.finish_reason = reason = self._reason(ended or text.stopped)
        said = text.read(reason is not None)
        self.statistics.decode_seconds += time.perf_counter() - self._resumed
        return Delta(
            said,
            kept,
            replace(accepted, logits=None),  # they are large, as q is
            reason,
            self.statistics,
            anchor,
            replace(round_.proposal, q=None),
            text.found,
            logprobs_of(kept, accepted.logits, self.config.logprobs or 0),
            of_prompt,
        )

    def start_clock(self) -> None:
        self._begin = self._resumed = time.perf_counter()

    def resume(self) -> None:
        """Whoever reads the answer asks for more: from here on its clock runs."""
        self._resumed = time.perf_counter()

    def _count(self, round_: Round, tokens: int) -> None:
        statistics, proposal = self.statistics, round_.proposal
        self._plain_seconds = proposal.plain_seconds or self._plain_seconds
        statistics.plain_seconds += tokens * self._plain_seconds
        if statistics.generated_tokens:
            statistics.add_round(round_.accepted, proposal.mode)
        else:  # from the prompt's own pass
            statistics.near_ties = round_.accepted.near_ties
            statistics.time_to_first_token = time.perf_counter() - self._begin
        statistics.generated_tokens += tokens

    def _reason(self, stopped: bool) -> str | None:
        if stopped:
            return "stop"
        if not self.is_full or self.rounds:
            return None
        asked = self.statistics.generated_tokens >= self.config.max_tokens
        return "length" if asked or self.config.reads_only else "context"


def make_sequence(
    pair: Pair, prompt: Prompt, config: DecodeConfig, drafter: Drafter, alone: bool
) -> Sequence:
    """A sequence of which nothing was read.

    alone: no other will be in its passes, so plain decoding has no near-ties to decide. Raises
    DFlashError where the prompt, the grammar or a token does not fit the pair.
    """
    target = pair.target
    check_length(target, prompt)
    check_tokens(pair.tokenizer, config.sampling)
    config = replace(config, exact=config.guarded if alone else config.exact)
    state = State(target.new_cache(), drafter.new_context())
    state.constraint = constraint_of(pair, config, prompt.tokens)
    most = 1 if config.reads_only else config.max_tokens
    state.end = min(len(prompt) - 1 + most, target.context_length - 1)
    return Sequence(pair, state, drafter, prompt, config)


def check_length(target: Target, prompt: Prompt) -> None:
    """Raise DFlashError for a prompt that is empty or leaves no room for an answer."""
    limit = target.context_length
    if not len(prompt):
        raise DFlashError("the prompt is empty", "give at least one token")
    if len(prompt) >= limit:
        raise DFlashError(
            f"the prompt has {len(prompt)} tokens, but {target.name} can hold "
            f"{limit} with the answer",
            "shorten the prompt or begin a new conversation",
        )


def check_tokens(tokenizer: Any, sampling: SamplingConfig) -> None:
    """Raise DFlashError for settings of a token that the model does not have."""
    biased = [token for token, _ in sampling.logit_bias]
    for name, tokens in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = [token for token in tokens if not 0 <= token < len(tokenizer)]
        require(not wrong, name, wrong[:1], "tokens that the model has")


def acceptance_rule(
    target: Target, state: State, config: DecodeConfig, sampler: Sampler
) -> TargetSampling:
    """The acceptance rule that the settings ask for, under the answer's grammar."""
    if state.constraint is not None:
        sampler = MaskedSampler(sampler, state.constraint)
    if config.exact:
        return NearTieGuard(target, sampler, noise_of(target))
    return RejectionSampling(sampler) if config.draws_drafts else TargetSampling(sampler)


def constraint_of(pair: Pair, config: DecodeConfig, prompt: abc.Sequence[int]) -> Constraint | None:
    """What an answer to `prompt` may be, None for anything; DFlashError if refused."""
    drafts = config.method != PLAIN
    if config.structure.kind:
        grammars = pair.recall(("grammars",), lambda: Grammars(pair.tokenizer, pair.target.name))
        return Constraint(grammars.matcher(config.structure), len(prompt), drafts)
    if config.thought_tokens is None:
        return None
    in_thought = opens_thought(pair.tokenizer, prompt)
    limit = ThoughtLimit(pair.tokenizer, config.thought_tokens, in_thought)
    return Constraint(limit, len(prompt), drafts)
