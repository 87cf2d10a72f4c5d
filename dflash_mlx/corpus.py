"""`python -m dflash_mlx.corpus`: collect a target's own answers, as training data for drafters."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.core.config import (
    ALL_BUT_MODEL,
    DecodeConfig,
    PairConfig,
    PrefixConfig,
    SamplingConfig,
)
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import earlier_texts
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.train.answers import Answers, Job, TurnWriter, lot, read_openings
from dflash_mlx.train.config import CorpusConfig
from dflash_mlx.train.data import rows_of
from dflash_mlx.train.rows import (
    CorpusFile,
    CorpusHeader,
    CorpusRow,
    open_corpus,
    tokenizer_fingerprint,
)

PROGRAM = "dflash_mlx.corpus"
_ONLY_HOW_MANY = ("batch_size", "method", "limit", "self_prompt")  # rows and how fast, not which


def main(argv: Sequence[str]) -> None:
    """Answer prompts until the file has all. Raises DFlashError for bad input."""
    arguments = parser().parse_args(argv)
    if arguments.learn is not None:
        print(learn(cli.open_pair(arguments), arguments.learn))
        return
    config = read_config(arguments)
    prompts = [] if arguments.prompts is None else read_prompts(arguments.prompts)
    with open_corpus(arguments.out) as file:
        pair = cli.open_pair(arguments, DecodeConfig(config.method))
        # What is collected does not depend on what drafts, which may want arguments of its own.
        pair = replace(pair, template=cli.read_pair_config(arguments).template_arguments)
        file.begin(make_header(pair, config))
        collection = Collection(pair, config, file)
        missing, begin = collection.ask(prompts), time.perf_counter()
        with tqdm(total=missing, unit="row", miniters=0) as bar:
            for rows in collection.run():
                bar.set_postfix_str(collection.progress(time.perf_counter() - begin), refresh=False)
                bar.update(rows)
    print(collection.report())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Collect the target's own answers, as training data for drafters. A run that "
        "was stopped continues when it is started again with the same options.",
    )
    result.add_argument(
        "--prompts", type=Path, help="JSON lines with id, category, and messages or prompt"
    )
    which = result.add_mutually_exclusive_group(required=True)
    which.add_argument("--out", type=Path, help="the corpus; rows are appended")
    told = "a corpus of this model, whose answers may help to draft those of your chats"
    which.add_argument("--learn", type=Path, metavar="FILE", help=told)
    result.add_argument("--openings", type=Path, help="a JSON list of openings, see --opening")
    others = tuple(name for name in ALL_BUT_MODEL if name not in ("drafter", "template"))
    cli.add_options(result, PairConfig, CorpusConfig, without=others)
    return result


def learn(pair: Pair, corpus: Path) -> str:
    """Add answers to what the chat's drafts may come from; DFlashError where they cannot be."""
    store = earlier_texts(PrefixConfig()).of(pair.target.name, pair.tokenizer)
    assert store is not None  # as the settings are the usual ones
    rows = [*rows_of(corpus, pair)]
    if not rows:
        raise DFlashError(f"{corpus} has no answer of {pair.target.name}", "name another file")
    for row in rows:
        store.add(row.prompt + row.answer)
    store.wait()
    if store.problem:
        raise DFlashError(store.problem, "mend that, and give the command again")
    return f"{len(rows)} answers of {corpus} may help to draft those of your chats"


def read_config(arguments: argparse.Namespace) -> CorpusConfig:
    """The settings; DFlashError for options that do not go together."""
    config = cli.read_options(arguments, CorpusConfig)
    if (arguments.prompts is None) == (config.self_prompt is None):
        raise DFlashError("there must be one source of prompts", "give --prompts or --self-prompt")
    if arguments.openings is not None:
        config = replace(config, opening=config.opening + read_openings(arguments.openings))
    if config.opening and config.self_prompt is None:
        raise DFlashError("openings begin the turns of --self-prompt", "leave them out, or give it")
    if config.limit is not None and config.self_prompt is not None:
        raise DFlashError("--limit counts prompts of a file", "give the number to --self-prompt")
    return config


def make_header(pair: Pair, config: CorpusConfig) -> CorpusHeader:
    """The header of what this pair's target answers with these settings."""
    settings = {k: v for k, v in asdict(config).items() if k not in _ONLY_HOW_MANY}
    settings["opening"] = list(config.opening)  # as JSON gives it back
    settings["source"] = "prompts" if config.self_prompt is None else "self"
    if pair.template:
        settings["template"] = dict(pair.template)
    vocab_size = int(pair.target.embedding().weight.shape[0])
    return CorpusHeader(
        pair.target.name, vocab_size, tokenizer_fingerprint(pair.tokenizer), settings
    )


def question(pair: Pair, config: CorpusConfig, row: dict[str, Any]) -> CorpusRow:
    """A row of `read_prompts` as one without an answer."""
    messages = row["messages"]
    tokens = prompt_tokens(pair.tokenizer, messages, config.system, template=pair.template)
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
    name = str(row.get("id", digest[:16]))
    return CorpusRow(name, row["category"], tuple(tokens))


class Collection:
    """One run: answers go into `file` as they finish.

    Whether a prompt is answered greedily, and the seed of its draws, depend on `config.seed` and
    the prompt's id alone, so a run that was killed continues as if it had not been.
    """

    def __init__(self, pair: Pair, config: CorpusConfig, file: CorpusFile) -> None:
        self.answers = Answers(pair, config.method, config.batch_size)
        self._skipped = 0  # prompts that are too long
        self._pair, self._config, self._file = pair, config, file
        self._turns: TurnWriter | None = None  # where the model writes them itself

    def ask(self, prompts: Sequence[dict[str, Any]]) -> int:
        """Queue the prompts that lack an answer, or user turns; returns how many.

        Raises DFlashError for an id that comes twice or was given to another prompt, and where no
        prompt fits the context.
        """
        if self._config.self_prompt is None:
            jobs = [self._job(prompt) for prompt in self._missing(prompts)]
        else:
            self._turns = TurnWriter(self._pair, self._config, self._file.rows)
            jobs = self._turns.start(max(self._config.self_prompt - len(self._file.rows), 0))
        self.answers.waiting.extend(jobs)
        return len(jobs)

    def _missing(self, prompts: Sequence[dict[str, Any]]) -> list[CorpusRow]:
        shuffled = list(prompts)
        random.Random(self._config.seed).shuffle(shuffled)
        limit = self._config.limit
        asked = [question(self._pair, self._config, row) for row in shuffled[:limit]]
        repeated = [name for name, count in Counter(q.id for q in asked).items() if count > 1]
        if repeated:
            raise DFlashError(f"two prompts have the id {repeated[0]!r}", "give each its own")
        room = self._pair.target.context_length
        fitting = [prompt for prompt in asked if len(prompt.prompt) < room]
        self._skipped = len(asked) - len(fitting)
        if not fitting:
            what = f"none of the {len(asked)} prompts fits the model's context of {room} tokens"
            raise DFlashError(what, "give shorter ones")
        done = {row.id: row.prompt for row in self._file.rows}
        for prompt in fitting:
            if done.get(prompt.id, prompt.prompt) != prompt.prompt:
                at = f"{self._file.path} has an answer to another prompt with the id {prompt.id!r}"
                step = "give prompts ids of their own, or name another file with --out"
                raise DFlashError(at, step)
        return [prompt for prompt in fitting if prompt.id not in done]

    def run(self) -> Iterator[int]:
        """Decode all that is queued; yields how many rows each step has put into the file."""
        for finished in self.answers.run():
            yield sum(self._finish(job) for job in finished)

    def _finish(self, job: Job) -> bool:
        waiting = self.answers.waiting
        if self._turns is not None and not isinstance(job.key, CorpusRow):
            if (prompt := self._turns.prompt(job)) is None:
                waiting.extend(self._turns.start(1))
            else:
                waiting.appendleft(self._job(prompt))
            return False
        self._file.append(replace(job.key, answer=tuple(job.tokens), finish=job.finish))
        return True

    def _job(self, asked: CorpusRow) -> Job:
        config, (chance, seed) = self._config, lot(self._config.seed, asked.id)
        greedy = chance < config.greedy_share
        heat, top_p = (0.0, 1.0) if greedy else (config.temperature, config.top_p)
        return Job(
            key=replace(asked, temperature=heat, top_p=top_p, seed=None if greedy else seed),
            prompt=asked.prompt,
            max_tokens=min(config.max_tokens, self._pair.target.context_length - len(asked.prompt)),
            sampling=SamplingConfig(heat, top_p, seed=seed),
        )

    @property
    def _looped(self) -> int:
        return sum(row.finish == "loop" for row in self._file.rows)

    def progress(self, seconds: float) -> str:
        rate, per_round = self.answers.generated / seconds, self.answers.tokens_per_round
        looped = self._looped / max(len(self._file.rows), 1)
        return f"{rate:.0f} tok/s, {per_round:.2f} tokens/round, {looped:.0%} looped"

    def report(self) -> str:
        parts = [f"{len(self._file.rows)} rows, {self._looped} cut where they looped"]
        if self._skipped:
            parts.append(f"{self._skipped} prompts were longer than the context and left out")
        if self._turns is not None and (rejected := self._turns.rejected):
            parts.append(f"{rejected} user turns were empty, too long or not new")
        return "; ".join(parts)


if __name__ == "__main__":
    cli.run(main, PROGRAM)
