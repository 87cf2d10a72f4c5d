"""Many answers at once are those of each alone, however long, and loops are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_target
from dflash_mlx.train.corpus.answers import Answers, Job, loop_end
from dflash_mlx.verifier.model import Target
from support.decoding import answer
from support.families import SLIDING, VOCAB_SIZE, make_model
from support.models import EOS, write_model


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_models_with_sliding_windows_answer_as_they_do_alone(name, method):
    assert name in SLIDING
    target = Target(make_model(name), 512, name)
    prompts = [random_prompt(i, 5 + 6 * i) for i in range(5)]
    jobs = [job(i, prompt, temperature=0.8, max_tokens=12) for i, prompt in enumerate(prompts)]
    together = {done.key: tuple(done.tokens) for done in run(target, jobs, 5, method)}
    alone = {done.key: tuple(done.tokens) for done in run(target, jobs, 1, "none")}
    assert together == alone
    assert len(set(together.values())) == len(prompts)


def test_answers_that_loop_are_cut_where_plain_decoding_began_to_repeat_itself():
    target = Target(make_model("qwen3"), 512, "qwen3")
    config, looped = DecodeConfig(max_tokens=150), 0
    jobs = [job(i, random_prompt(i, 9)) for i in range(6)]
    for done in run(target, jobs, 4, "ngram"):
        said = answer(target, NoDraft(), done.prompt, config)
        said = said[: said.index(EOS) + 1] if EOS in said else said
        ends = [end for i in range(1, len(said) + 1) if (end := loop_end(said[:i])) is not None]
        assert (done.finish == "loop") == bool(ends)
        assert done.tokens == list(said[: ends[0]] if ends else said)
        looped += bool(ends)
    assert 0 < looped < len(jobs), "the tiny model does not show both"


def test_no_pass_reads_more_prompts_than_it_should():
    target = Target(make_model("llama"), 4096, "llama")
    jobs = [job(i, (5,) * 500, max_tokens=2) for i in range(12)]
    rows, forward = [], target.forward_all

    def counting(sequences, aux_layers):
        rows.append(sum(each.block.rows for each in sequences))
        return forward(sequences, aux_layers)

    target.forward_all = counting
    assert len(run(target, jobs, 12, "none")) == 12
    assert rows[0] == 5 * 500, "the others wait until these are read"
    assert max(rows) <= rows[0] + len(jobs), "and those who decode have a row each"


@cache
def tokenizer() -> Any:
    with TemporaryDirectory() as folder:
        return load_target(str(write_model(Path(folder)))).tokenizer


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist())


def job(key: int, prompt: tuple[int, ...], temperature: float = 0.0, max_tokens: int = 150) -> Job:
    sampling = SamplingConfig(temperature, 0.9, seed=key)
    return Job(key, prompt, frozenset([EOS]), max_tokens, sampling)


def run(target: Target, jobs: Sequence[Job], most: int, method: str) -> list[Job]:
    answers = Answers(Pair(target, tokenizer()), method, most)
    answers.waiting.extend(replace(job, tokens=[]) for job in jobs)
    found = [done for step in answers.run() for done in step]
    assert answers.generated >= sum(len(done.tokens) for done in found)
    assert answers.tokens_per_round >= 1
    return found
