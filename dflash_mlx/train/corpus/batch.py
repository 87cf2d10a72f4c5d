"""Many answers at once, on mlx-lm's continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash_mlx.system import cpu_math
from dflash_mlx.target.model import Target

LONGEST_PERIOD = 32  # tokens of a cycle that ends an answer
REPEATS = 3
LEAST_TOKENS = 24
# mlx-lm copies every cache of the batch when a sequence joins or leaves, which costs as much as
# several steps. So they come and go together, when this share of the batch has finished.
_FINISHED_SHARE = 0.25
_PREFILL = 512  # prompt tokens per pass
_NO_LIMIT = 1 << 30  # answers end here, not in mlx-lm: loops and stop tokens vary by job
_TAIL = 12.0  # nats below the likeliest token; nearly always more than top-p keeps


@dataclass(frozen=True)
class Job:
    """One text to write.

    key: whatever the caller knows it by. seed: of its draws; temperature 0 is greedy.
    """

    key: Any
    prompt: tuple[int, ...]
    stops: frozenset[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Done:
    """A finished job; finish: "stop" (its token is the last), "length" or "loop"."""

    job: Job
    tokens: tuple[int, ...]
    finish: str


@dataclass
class _Running:
    job: Job
    tokens: list[int] = field(default_factory=list)
    over: bool = False

    def finish(self) -> str | None:
        if self.tokens[-1] in self.job.stops:
            return "stop"
        if (end := loop_end(self.tokens)) is not None:
            del self.tokens[end:]
            return "loop"
        return "length" if len(self.tokens) >= self.job.max_tokens else None


class BatchDecoder:
    """Runs jobs, `batch_size` at a time; more may be added while it runs.

    A draw depends on the logits, the job's seed and how many draws came before in that job.
    Logits differ in the last bits with the company a sequence has in its batch, so an answer is
    the same in every run except where two tokens are nearly equally likely.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        from mlx_lm.generate import BatchGenerator

        self.waiting: deque[Job] = deque()
        self.generated = 0  # tokens, those of unfinished jobs included
        self._model = target.model
        self._size = batch_size
        self._generator = BatchGenerator(
            self._model,
            max_tokens=_NO_LIMIT,
            completion_batch_size=batch_size,
            prefill_batch_size=batch_size,
        )
        self._rows: dict[int, _Running] = {}  # by mlx-lm's number, in the order of its batch

    def run(self) -> Iterator[list[Done]]:
        """The jobs that each step finished, often none, until no job is left."""
        while self.waiting or self._rows:
            with cpu_math.vectorised():
                self._admit()
                done = list(self._step())
            yield done

    def _admit(self) -> None:
        """Let finished jobs go and waiting ones in, where that is worth its price."""
        over = [number for number, row in self._rows.items() if row.over]
        if over and len(over) >= _FINISHED_SHARE * len(self._rows):
            self._generator.remove(over)
            for number in over:
                del self._rows[number]
        if self.waiting and len(self._rows) <= (1 - _FINISHED_SHARE) * self._size:
            count = min(self._size - len(self._rows), len(self.waiting))
            jobs = [self.waiting.popleft() for _ in range(count)]
            numbers = self._generator.insert(
                [[job.prompt[-1]] for job in jobs],
                caches=[self._prefill(job.prompt[:-1]) for job in jobs],
                all_tokens=[list(job.prompt[:-1]) for job in jobs],
                samplers=[_sampler(job) for job in jobs],
            )
            self._rows |= {number: _Running(job) for number, job in zip(numbers, jobs, strict=True)}

    def _prefill(self, prompt: Sequence[int]) -> list[Any]:
        """Caches that hold `prompt`, computed alone: padding would cost more than it saves."""
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self._model)
        for start in range(0, len(prompt), _PREFILL):
            self._model(mx.array([list(prompt[start : start + _PREFILL])]), cache=caches)
            mx.eval([cache.state for cache in caches])
        return caches

    def _step(self) -> Iterator[Done]:
        """One token for every row; yields those that it finished."""
        for response in self._generator.next_generated():
            row = self._rows[response.uid]
            if row.over:
                continue
            row.tokens.append(int(response.token))
            self.generated += 1
            if (finish := row.finish()) is not None:
                row.over = True
                yield Done(row.job, tuple(row.tokens), finish)


def _sampler(job: Job) -> Callable[[mx.array], mx.array]:
    """What gives the next token [B] for log-probabilities [B, V]; B is 1 for draws.

    mlx-lm's own samplers share one random state, so that a row's draws would depend on its company
    and could not be repeated from the seed that is written beside it.
    """
    if job.temperature == 0:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    uniform = np.random.default_rng(job.seed)

    def sample(logprobs: mx.array) -> mx.array:
        row = np.array(logprobs.astype(mx.float32))[0]
        return mx.array([draw(row, job.temperature, job.top_p, uniform.random())])

    return sample


def draw(logprobs: NDArray[np.float32], temperature: float, top_p: float, at: float) -> int:
    """The token at quantile `at` of the law that temperature and top-p make of `logprobs` [V].

    As mlx-lm, top-p is taken before the temperature: the smallest set of likeliest tokens whose
    mass reaches it. Tokens are ordered by falling probability.
    """
    likely = np.flatnonzero(logprobs > logprobs.max() - _TAIL)
    if np.exp(logprobs[likely]).sum() < top_p:
        likely = np.arange(len(logprobs))
    likely = likely[np.argsort(-logprobs[likely], kind="stable")]
    mass = np.cumsum(np.exp(logprobs[likely], dtype=np.float64))
    likely = likely[: int(np.searchsorted(mass, top_p)) + 1]
    weights = np.exp((logprobs[likely] - logprobs[likely[0]]).astype(np.float64) / temperature)
    total = np.cumsum(weights)
    place = int(np.searchsorted(total, at * total[-1], side="right"))
    return int(likely[min(place, len(likely) - 1)])


def loop_end(tokens: Sequence[int]) -> int | None:
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
