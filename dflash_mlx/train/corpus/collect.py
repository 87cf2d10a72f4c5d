"""From prompts to rows: queue what a file lacks, decode it, append every answer at once."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from dflash_mlx.core.config import CorpusConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.train.corpus.batch import BatchDecoder, Done, Job
from dflash_mlx.train.corpus.rows import CorpusHeader, CorpusRow, tokenizer_fingerprint
from dflash_mlx.train.corpus.self_prompt import TurnWriter, lot
from dflash_mlx.train.corpus.writer import CorpusFile

_ONLY_HOW_MANY = ("batch_size", "limit", "self_prompt")  # rows, not which


class Collection:
    """One run: answers go into `file` as they finish.

    Whether a prompt is answered greedily, and the seed of its draws, depend on `config.seed` and
    the prompt's id alone, so a run that was killed continues as if it had not been.
    """

    def __init__(self, pair: Pair, config: CorpusConfig, file: CorpusFile) -> None:
        self.decoder = BatchDecoder(pair.target, config.batch_size)
        self.finishes = Counter(row.finish for row in file.rows)
        self.skipped = 0  # prompts that are too long
        self._pair = pair
        self._config = config
        self._file = file
        self._done = {row.id: row.prompt for row in file.rows}
        self.turns: TurnWriter | None = None  # where the model writes them itself

    def ask(self, prompts: Sequence[dict[str, Any]]) -> int:
        """Queue what `prompts` (rows of `read_prompts`) still lack; returns how many.

        With `config.self_prompt` the model writes user turns until so many are answered. Raises
        DFlashError for an id that comes twice or was given to another prompt, and where no prompt
        fits the context.
        """
        if self._config.self_prompt is None:
            jobs = [self._job(prompt) for prompt in self._missing(prompts)]
        else:
            self.turns = TurnWriter(self._pair, self._config, self._file.rows)
            jobs = self.turns.start(max(self._config.self_prompt - len(self._file.rows), 0))
        self.decoder.waiting.extend(jobs)
        return len(jobs)

    def _missing(self, prompts: Sequence[dict[str, Any]]) -> list[CorpusRow]:
        shuffled = list(prompts)
        random.Random(self._config.seed).shuffle(shuffled)
        asked = [self._prompt(row) for row in shuffled[: self._config.limit]]
        repeated = [name for name, count in Counter(q.id for q in asked).items() if count > 1]
        if repeated:
            raise DFlashError(f"two prompts have the id {repeated[0]!r}", "give each its own")
        room = self._pair.target.context_length
        fitting = [prompt for prompt in asked if len(prompt.prompt) < room]
        self.skipped = len(asked) - len(fitting)
        if not fitting:
            raise DFlashError(
                f"none of the {len(asked)} prompts fits the model's context of {room} tokens",
                "give shorter ones",
            )
        for prompt in fitting:
            if prompt.id in self._done and self._done[prompt.id] != prompt.prompt:
                raise DFlashError(
                    f"{self._file.path} has an answer to another prompt with the id {prompt.id!r}",
                    "give prompts ids of their own, or name another file with --out",
                )
        return [prompt for prompt in fitting if prompt.id not in self._done]

    def run(self) -> Iterator[list[CorpusRow]]:
        """Decode all that is queued, step by step; rows are in the file when they are yielded."""
        for finished in self.decoder.run():
            rows = [self._finish(done) for done in finished]
            yield [row for row in rows if row is not None]

    def _finish(self, done: Done) -> CorpusRow | None:
        """Append an answer; queue what a user turn asks for, or another where it is no good."""
        asked, waiting = done.job.key, self.decoder.waiting
        if self.turns is not None and not isinstance(asked, CorpusRow):
            if (prompt := self.turns.prompt(done)) is None:
                waiting.extend(self.turns.start(1))
            else:
                waiting.appendleft(self._job(prompt))
            return None
        row: CorpusRow = replace(asked, answer=done.tokens, finish=done.finish)
        self._file.append(row)
        self.finishes[row.finish] += 1
        return row

    def _job(self, asked: CorpusRow) -> Job:
        """Answer a row that lacks it, greedily or not, as its id and the seed decide."""
        config, (chance, seed) = self._config, lot(self._config.seed, asked.id)
        greedy = chance < config.greedy_share
        heat, top_p = (0.0, 1.0) if greedy else (config.temperature, config.top_p)
        return Job(
            key=replace(asked, temperature=heat, top_p=top_p, seed=None if greedy else seed),
            prompt=asked.prompt,
            stops=frozenset(self._pair.tokenizer.eos_token_ids),
            max_tokens=min(config.max_tokens, self._pair.target.context_length - len(asked.prompt)),
            temperature=heat,
            top_p=top_p,
            seed=seed,
        )

    def _prompt(self, row: dict[str, Any]) -> CorpusRow:
        messages = row["messages"]
        digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        tokens = prompt_tokens(
            self._pair.tokenizer, messages, self._config.system, template=self._pair.template
        )
        return CorpusRow(str(row.get("id", digest[:16])), row["category"], tuple(tokens))


def make_header(pair: Pair, config: CorpusConfig) -> CorpusHeader:
    """The header of what this pair's target answers with these settings."""
    settings = asdict(config)
    for name in _ONLY_HOW_MANY:
        del settings[name]
    settings["opening"] = list(config.opening)  # as JSON gives it back
    settings["source"] = "prompts" if config.self_prompt is None else "self"
    if pair.template:
        settings["template"] = dict(pair.template)
    vocab_size = int(pair.target.embedding().weight.shape[0])
    return CorpusHeader(
        pair.target.name, vocab_size, tokenizer_fingerprint(pair.tokenizer), settings
    )
