"""Many answers at once, with drafts: a client of the scheduler."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.session.scheduler import Scheduler

LONGEST_PERIOD = 32  # tokens of a cycle that ends an answer
REPEATS = 3
LEAST_TOKENS = 24
_UNREAD = 2048  # tokens of prompts from which on no more jobs begin, so that no pass is huge


@dataclass
class Job:
    """One text to write, and what became of it."""

    key: Any  # whatever the caller knows it by
    prompt: tuple[int, ...]
    stops: frozenset[int]
    max_tokens: int
    sampling: SamplingConfig  # with a seed of the job's own
    tokens: list[int] = field(default_factory=list)
    finish: str = ""  # "stop" (its token is the last), "length" or "loop"

    def add(self, token: int) -> bool:
        """Take in a token; whether the text ends with it."""
        self.tokens.append(token)
        if token in self.stops:
            self.finish = "stop"
        elif (end := loop_end(self.tokens)) is not None:
            del self.tokens[end:]
            self.finish = "loop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish = "length"
        return self.finish != ""


def loop_end(tokens: abc.Sequence[int]) -> int | None:
    """How many of `tokens` to keep where their tail repeats a short cycle, None where it does not.

    A tail is a loop when a cycle of at most LONGEST_PERIOD tokens fills it REPEATS times or more
    and it has at least LEAST_TOKENS tokens. What is kept ends with the first repetition.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        end = len(tokens)
        while end > period and tokens[end - 1] == tokens[end - 1 - period]:
            end -= 1
        if len(tokens) - end >= max((REPEATS - 1) * period, LEAST_TOKENS - period):
            return end + period
    return None


class Answers:
    """Runs jobs, `most` at a time; more may be added while it runs.

    A token depends on the logits, the job's seed and its position, whatever was drafted. Logits
    differ in the last bits with the company a sequence has in a pass, so an answer is the same in
    every run except where two tokens are nearly equally likely.
    """

    def __init__(self, pair: Pair, method: str, most: int) -> None:
        self.waiting: deque[Job] = deque()
        self.generated = 0  # tokens, those of unfinished jobs included
        self._method, self._most, self._rounds, self._begun = method, most, 0, 0
        self._scheduler = Scheduler(pair)
        self._scheduler.fair = False
        self._running: dict[Sequence, Job] = {}

    @property
    def tokens_per_round(self) -> float:
        """Of all jobs; their first tokens, which come with the prompts, are left out."""
        return (self.generated - self._begun) / self._rounds if self._rounds else 0.0

    def run(self) -> Iterator[list[Job]]:
        """The jobs that each step finished, often none, until no job is left."""
        while self.waiting or self._running:
            self._admit()
            done = []
            for sequence, told in self._scheduler.step():
                if isinstance(told, Exception):
                    raise told
                job = self._running.get(sequence)
                if job is not None and self._take(job, told.tokens):
                    self._scheduler.cancel(sequence)
                    done.append(self._running.pop(sequence))
            yield done

    def _admit(self) -> None:
        reading = [each for each in self._running if each.is_reading]
        unread = sum(len(each.prompt) - each.state.position for each in reading)
        while self.waiting and len(self._running) < self._most and unread < _UNREAD:
            job = self.waiting.popleft()
            config = DecodeConfig(self._method, max_tokens=job.max_tokens, sampling=job.sampling)
            self._running[self._scheduler.submit(job.prompt, config)] = job
            unread += len(job.prompt)

    def _take(self, job: Job, tokens: abc.Sequence[int]) -> bool:
        """Count a round's tokens up to the end of the text; whether it has ended."""
        begins = not job.tokens
        self._begun, self._rounds = self._begun + begins, self._rounds + (not begins)
        for token in tokens:
            self.generated += 1
            if job.add(token):
                return True
        return False
