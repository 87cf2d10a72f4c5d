"""Many answers at once, with drafts: a client of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import TargetSampling
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.train.corpus.loops import loop_end

_READING = DecodeConfig(prefill_step=512)  # tokens of one prompt in a pass
_UNREAD = 2048  # tokens of prompts from which on no more jobs begin, so that no pass is huge


@dataclass(frozen=True)
class Job:
    """One text to write.

    key: whatever the caller knows it by. sampling: with a seed of the job's own.
    """

    key: Any
    prompt: tuple[int, ...]
    stops: frozenset[int]
    max_tokens: int
    sampling: SamplingConfig


@dataclass(frozen=True)
class Done:
    """A finished job; finish: "stop" (its token is the last), "length" or "loop"."""

    job: Job
    tokens: tuple[int, ...]
    finish: str


@dataclass
class _Text:
    job: Job
    tokens: list[int] = field(default_factory=list)

    def add(self, token: int) -> str | None:
        """Take in a token; how the text ends with it, None where it goes on."""
        self.tokens.append(token)
        if token in self.job.stops:
            return "stop"
        if (end := loop_end(self.tokens)) is not None:
            del self.tokens[end:]
            return "loop"
        return "length" if len(self.tokens) >= self.job.max_tokens else None


class Answers:
    """Runs jobs, `most` at a time; more may be added while it runs.

    method: how drafts are made, as in `DecodeConfig`. generated: tokens, those of unfinished jobs
    included. A token depends on the logits, the job's seed and its position, whatever was drafted.
    Logits differ in the last bits with the company a sequence has in a pass, so an answer is the
    same in every run except where two tokens are nearly equally likely.
    """

    def __init__(self, pair: Pair, method: str, most: int) -> None:
        self.waiting: deque[Job] = deque()
        self.generated = 0
        self._most, self._rounds, self._begun = most, 0, 0
        self._drafter = make_drafter(pair, DecodeConfig(method))
        self._scheduler = Scheduler(pair)
        self._scheduler.fair = False
        self._texts: dict[Sequence, _Text] = {}

    @property
    def tokens_per_round(self) -> float:
        """Of all jobs; their first tokens, which come with the prompts, are left out."""
        return (self.generated - self._begun) / self._rounds if self._rounds else 0.0

    def run(self) -> Iterator[list[Done]]:
        """The jobs that each step finished, often none, until no job is left."""
        while self.waiting or self._texts:
            self._admit()
            taken = [self._take(*both) for both in self._scheduler.step()]
            yield [done for done in taken if done is not None]

    def _admit(self) -> None:
        reading = [each for each in self._texts if each.is_reading]
        unread = sum(len(each.prompt) - each.state.position for each in reading)
        while self.waiting and len(self._texts) < self._most and unread < _UNREAD:
            job = self.waiting.popleft()
            state = State(self._scheduler.target.new_cache(), self._drafter.new_context())
            state.end = len(job.prompt) - 1 + job.max_tokens
            rule = TargetSampling(Sampler(job.sampling))
            sequence = Sequence(state, self._drafter, Prompt(job.prompt), _READING, rule)
            self._scheduler.add(sequence)
            self._texts[sequence] = _Text(job)
            unread += len(job.prompt)

    def _take(self, sequence: Sequence, told: Delta | Exception) -> Done | None:
        """Take in what became of a sequence in a step; its job where that is finished."""
        if isinstance(told, Exception):
            raise told
        if (text := self._texts.get(sequence)) is None:
            return None
        begins = not text.tokens
        self._begun, self._rounds = self._begun + begins, self._rounds + (not begins)
        for token in told.tokens:
            self.generated += 1
            if (finish := text.add(token)) is not None:
                self._scheduler.cancel(sequence)
                del self._texts[sequence]
                return Done(text.job, tuple(text.tokens), finish)
        return None
