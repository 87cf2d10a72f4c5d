"""One request on its way: its prompt is read, then its answer is decoded."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import mlx.core as mx

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.acceptance import AcceptanceRule
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.drafter import Drafter, Proposal, Round
from dflash_mlx.engine.logprobs import logprobs_of
from dflash_mlx.engine.state import State
from dflash_mlx.engine.text import StopText
from dflash_mlx.engine.verify import Verdict
from dflash_mlx.verifier.model import Target


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # for a place among those that run
    PREFILL = "prefill"  # its prompt is read
    DECODE = "decode"
    PREEMPTED = "preempted"  # its caches were given up; it waits, and is read again
    FINISHED = "finished"


class Sequence:
    """A prompt, what was read and decoded of it, and the answer so far.

    Without a rule, and nothing that makes one, only the prompt is read.
    """

    def __init__(
        self,
        state: State,
        drafter: Drafter,
        prompt: Prompt,
        *,
        prefill_step: int = sys.maxsize,
        rule: AcceptanceRule | Callable[[], AcceptanceRule] | None = None,
        exact: bool = False,
    ) -> None:
        self.state, self.drafter, self.prompt = state, drafter, prompt
        self.prefill_step = prefill_step  # prompt tokens per pass, at most
        self.may_read = sys.maxsize  # the same for the next pass, as the scheduler has it
        # Its prompt is read by the passes that would read it alone, since the keys and values of
        # others differ in the last bits.
        self.exact = exact
        self.reused = 0  # tokens of the prompt that another has read
        self.has_looked = False  # for another that has read some of its prompt
        self.took = 0  # bytes of its caches when it was preempted
        self.rounds: deque[Round] = deque()  # done, or running, and not read yet
        self.finish_reason: str | None = None
        self.statistics = Statistics(drafter.name, prompt_tokens=len(prompt))
        self.status = Status.WAITING
        self.rule = None if callable(rule) else rule
        self.make_rule = rule if callable(rule) else None  # behind the prompt
        self.full = "length"  # why the answer ends where it has no room any more
        self.top_logprobs = 0  # likeliest tokens that deltas tell, where the rule keeps logits
        self.text: StopText | None = None  # reads the answer and looks for its end
        self._preempted_at: Accepted | None = None  # the newest token, where it was preempted
        self._anchor, self._ended = prompt.tokens[-1] if len(prompt) else 0, False
        self._plain_seconds = 0.0  # of a round of plain decoding, from the last that knew
        self.start_clock()

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.state.position < len(self.prompt)

    @property
    def opens(self) -> bool:
        """Whether the prompt is read, and the answer has no token yet."""
        return not self.is_reading and not self.state.has_begun

    @property
    def is_full(self) -> bool:
        """Whether no further token may follow."""
        return self.state.has_begun and self.state.remaining <= 0

    @property
    def length(self) -> int:
        """Tokens of the conversation, the answer included."""
        return self.statistics.prompt_tokens + self.statistics.generated_tokens

    @property
    def rounds_ahead(self) -> int:
        """Rounds that may start before the first of them is read."""
        if self.rule is None or self.rule.needs_history:
            return 0
        return self.drafter.rounds_ahead

    def next_chunk(self) -> int:
        """Prompt tokens that the next pass reads: up to the tail, where that is a pass of its own.

        A recurrent state can go back to where the pass over the tail began.
        """
        first, last, rows = self.state.position, len(self.prompt), self.state.cache.tail
        most = self.prefill_step if self.exact else min(self.prefill_step, self.may_read)
        end = min(first + most, last)
        tail = last - min(rows + 1, most) if rows else last
        return (tail if first < tail < end else end) - first

    def restore_from(self, other: State) -> None:
        """Reuse what another sequence has read; `other` is then of no more use."""
        self.has_looked, length = True, other.reuse(self.prompt)
        self.state.restore_from(other)
        if self._preempted_at is None:
            self.reused = length

    def preempt(self, target: Target) -> None:
        """Give up all caches; what they held is read again, as a prompt."""
        self.status, self.took = Status.PREEMPTED, self.state.nbytes
        if self.state.has_begun:
            *tokens, newest = self.state.tokens
            self.prompt = Prompt(tuple(tokens), self.prompt.pieces)
            self._preempted_at = Accepted(Tree.chain(), (0,), newest)
        self.state.restart(target.new_cache(), self.drafter.new_context())
        self.has_looked = False

    def end_prompt(self, logits: mx.array) -> Round | None:
        """Take in the logits after a prompt; an answer that had begun goes on where it was."""
        self.state.end_prompt(logits)
        self.status = Status.DECODE
        if self._preempted_at is None:
            self.resume()
            self.statistics.prefill_seconds = self._resumed - self._begin
            self.statistics.reused_tokens = self.reused
            return self.open() if self.rule or self.make_rule else None
        self.state.begin(self._preempted_at)
        self._preempted_at = None
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

    def next_delta(self) -> Delta:
        """What the oldest unread round adds; tokens behind a stop are left out. Waits for it."""
        round_ = self.rounds.popleft()
        accepted, proposal = round_.accepted.wait(), replace(round_.proposal, q=None)  # it is large
        kept = accepted.tokens if self.text is None else self.text.take(accepted.tokens)
        self._ended = accepted.ends and kept == accepted.tokens
        self._count(round_, len(kept))
        anchor, self._anchor = self._anchor, kept[-1]
        self.finish_reason = reason = self._reason()
        text = self.text.read(reason is not None) if self.text is not None else ""
        self.statistics.decode_seconds += time.perf_counter() - self._resumed
        stop_text = self.text.found if self.text is not None else None
        logprobs = logprobs_of(kept, accepted.logits, self.top_logprobs)
        accepted = replace(accepted, logits=None)  # they are large, too
        told = text, kept, accepted, reason, self.statistics, anchor, proposal
        return Delta(*told, stop_text, logprobs)

    def start_clock(self) -> None:
        """The time to the first token counts from here."""
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

    def _reason(self) -> str | None:
        if self._ended or (self.text is not None and self.text.stopped):
            return "stop"
        over = self.is_full and not self.rounds
        return self.full if over else None


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
