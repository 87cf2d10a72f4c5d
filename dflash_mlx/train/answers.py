"""Many texts at once, with drafts: answers, and user turns that the model writes itself."""

from __future__ import annotations

import hashlib
import reprlib
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import read_json_file
from dflash_mlx.engine.delta import Delta
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.sequence import Sequence
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.train.config import CorpusConfig
from dflash_mlx.train.rows import CorpusRow

LONGEST_PERIOD = 32  # tokens of a cycle that ends an answer
REPEATS = 3
LEAST_TOKENS = 24
_MARK = "dflash4c7a1e"  # stands for the user's text
_PATIENCE = 20  # user turns rejected for each good one
_UNREAD = 2048  # tokens of prompts from which on no more jobs begin, so that no pass is huge


@dataclass
class Job:
    """One text to write, and what became of it."""

    key: Any  # whatever the caller knows it by
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingConfig  # with a seed of the job's own
    stops: frozenset[int] = frozenset()  # besides what ends every answer
    tokens: list[int] = field(default_factory=list)
    finish: str = ""  # "stop" (its token is the last), "length" or "loop"

    def add(self, token: int) -> bool:
        self.tokens.append(token)
        if token in self.stops:
            self.finish = "stop"
        elif (end := loop_end(self.tokens)) is not None:
            del self.tokens[end:]
            self.finish = "loop"
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
                if job is not None and self._take(job, told):
                    self._scheduler.cancel(sequence)
                    done.append(self._running.pop(sequence))
            yield done

    def _admit(self) -> None:
        reading = [each for each in self._running if each.is_reading]
        unread = sum(len(each.prompt) - each.state.position for each in reading)
        while self.waiting and len(self._running) < self._most and unread < _UNREAD:
            job = self.waiting.popleft()
            config = DecodeConfig(self._method, max_tokens=job.max_tokens, sampling=job.sampling)
            sequence = self._scheduler.submit(job.prompt, config)
            self._running[sequence] = job
            unread += len(job.prompt)

    def _take(self, job: Job, delta: Delta) -> bool:
        begins = not job.tokens
        self._begun, self._rounds = self._begun + begins, self._rounds + (not begins)
        for token in delta.tokens:
            self.generated += 1
            if job.add(token):
                return True
        job.finish = delta.finish_reason or ""
        return job.finish != ""


def lot(seed: int, name: str) -> tuple[float, int]:
    """A number from 0 to 1 and a 32-bit seed, the same for the same arguments everywhere."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    chance = int.from_bytes(digest[:8], "big") / 2**64
    return chance, int.from_bytes(digest[8:12], "big")


class TurnWriter:
    """Jobs that make the model write user turns, and the prompts that come of them.

    Turns are numbered; a number's opening and seed never change, so a run that was killed goes on
    with the numbers that the file lacks. rows: what the file holds.
    """

    def __init__(self, pair: Pair, config: CorpusConfig, rows: abc.Sequence[CorpusRow]) -> None:
        self.rejected, self._pair, self._config = 0, pair, config
        self._template = TurnTemplate(pair.tokenizer, config.system)
        self._openings = [text.rstrip(" ") for text in config.opening] or [""]
        self._seen = {message["content"] for row in rows for message in row.messages}
        done = {row.id for row in rows}
        self._numbers = (n for n in count() if self._id(n) not in done)

    def start(self, turns: int) -> list[Job]:
        """Jobs for the next user turns. Raises DFlashError where hardly any turn was any good."""
        if self.rejected > _PATIENCE * (len(self._seen) + 1):
            what = f"of {self.rejected + len(self._seen)} user turns that the model wrote, "
            what += f"{self.rejected} were empty, too long or had been there before"
            raise DFlashError(what, "give more openings, or ask for fewer with --self-prompt")
        return [self._job(n) for n in islice(self._numbers, turns)]

    def prompt(self, done: Job) -> CorpusRow | None:
        """A row without an answer for a written turn; None for one that is no good or not new."""
        n = done.key
        text = self._template.text(self._opening(n), done.tokens, done.finish)
        if text is not None and text not in self._seen:
            message = {"role": "user", "content": text}
            tokens = prompt_tokens(
                self._pair.tokenizer, [message], self._config.system, template=self._pair.template
            )
            if len(tokens) < self._pair.target.context_length:
                self._seen.add(text)
                return CorpusRow(self._id(n), "self", tuple(tokens), messages=(message,))
        self.rejected += 1
        return None

    def _job(self, n: int) -> Job:
        config = self._config
        prompt = self._template.prompt(self._opening(n))
        room = self._pair.target.context_length - len(prompt)
        if room < 1:
            raise DFlashError(f"opening {self._opening(n)[:40]!r} fills the context", "shorten it")
        seed = lot(config.seed, f"turn {n}")[1]
        return Job(
            key=n,
            prompt=prompt,
            stops=self._template.stops,
            max_tokens=min(config.self_max_tokens, room),
            sampling=SamplingConfig(config.self_temperature, config.self_top_p, seed=seed),
        )

    def _opening(self, n: int) -> str:
        return self._openings[n % len(self._openings)]

    def _id(self, n: int) -> str:
        return f"self-{self._config.seed}-{n}"


class TurnTemplate:
    """What stands before and behind a user's text in a model's chat template.

    The template is rendered around a mark: the model continues the text before it, and the text
    behind it ends the turn. Raises DFlashError for a template that has no such place.
    """

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        next_step = "give --prompts instead of --self-prompt"
        if not tokenizer.has_chat_template:
            raise DFlashError("this model has no chat template", next_step)
        messages = [{"role": "user", "content": _MARK}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as error:
            what = f"the model's chat template refuses the conversation ({error})"
            raise DFlashError(what, "leave --system out, or " + next_step) from None
        self._before, mark, behind = text.partition(_MARK)
        if not mark:
            raise DFlashError("the model's chat template changes the user's text", next_step)
        self._tokenizer = tokenizer
        self._end = behind.strip().split("\n")[0]
        eos = frozenset(tokenizer.eos_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        self._special = eos | {number for number, token in added if token.special}
        self.stops = eos | self._special & set(self._encode(behind)[:1])

    def prompt(self, opening: str) -> tuple[int, ...]:
        # An opening has no space at its end, which most vocabularies keep with the next word.
        return tuple(self._encode(self._before + opening))

    def text(self, opening: str, tokens: abc.Sequence[int], finish: str) -> str | None:
        """The user's text; None where it is empty, did not end or holds special tokens."""
        said = list(tokens)
        if said and said[-1] in self.stops:
            said.pop()
        text = str(self._tokenizer.decode(said))
        if self._end and self._end in text:  # the end of a turn may be plain text
            text, finish = text.partition(self._end)[0], "stop"
        if finish != "stop" or not text.strip() or self._special & set(said):
            return None
        return (opening + text).strip()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def read_openings(file: Path) -> tuple[str, ...]:
    """The openings in a JSON file; DFlashError when it is missing or holds something else."""
    shape = 'give a JSON list of texts like ["Explain", "Write a story about"]'
    openings = read_json_file(file, shape)
    are_texts = isinstance(openings, list) and all(isinstance(text, str) for text in openings)
    if not (openings and are_texts):
        raise DFlashError(f"{file} holds {reprlib.repr(openings)}", shape)
    return tuple(openings)
