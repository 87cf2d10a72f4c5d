"""The target's answers: plain decoding's own, whatever the batch, and none lost or made twice."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DecodeConfig, Pair, Session, load
from dflash_mlx import corpus as collect
from dflash_mlx.cli import options as cli
from dflash_mlx.core.config import PrefixConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.models.load import load_target
from dflash_mlx.session.session import earlier_texts
from dflash_mlx.train.answers import Answers, Job, loop_end
from dflash_mlx.train.rows import CorpusRow, read_rows
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from support.decoding import answer
from support.families import VOCAB_SIZE, make_model
from support.models import EOS, write_drafter, write_model

MAX_TOKENS = 40
PROMPTS = [
    {
        "id": f"p{i}",
        "category": "chat",
        "messages": [{"role": "user", "content": "ab Cd, e." * (i % 7) + f"{i}?"}],
    }
    for i in range(16)
]


def write_prompts(file: Path, prompts: Sequence[dict[str, Any]] = PROMPTS) -> Path:
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return file


def options(folder: Path, out: Path, *more: str) -> list[str]:
    words = ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl")]
    words += ["--out", str(out), "--max-tokens", str(MAX_TOKENS), "--batch-size", "8"]
    return [*words, *more]


def run(folder: Path, out: Path, *more: str) -> list[CorpusRow]:
    collect.main(options(folder, out, *more))
    return read_rows(out)


def by_id(rows: Sequence[CorpusRow]) -> dict[str, CorpusRow]:
    assert len({row.id for row in rows}) == len(rows), "a prompt was answered twice"
    return {row.id: row for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    write_model(root / "model")
    write_prompts(root / "prompts.jsonl")
    return root


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load(str(folder / "model"))


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, CorpusRow]:
    return by_id(run(folder, folder / "answered.jsonl"))


# What is answered


def test_every_prompt_is_answered_once_and_greedily_as_plain_decoding_says(answered, pair):
    assert answered.keys() == {prompt["id"] for prompt in PROMPTS}
    apply = pair.tokenizer.apply_chat_template
    for prompt in PROMPTS:
        row = answered[prompt["id"]]
        assert row.prompt == tuple(apply(prompt["messages"], add_generation_prompt=True))
        assert row.category == "chat"
    plain = Session(pair, DecodeConfig(method="none", max_tokens=MAX_TOKENS))
    greedy = [row for row in answered.values() if row.temperature == 0]
    for row in greedy:
        said = [token for delta in plain.stream(row.prompt) for token in delta.tokens]
        assert row.answer == tuple(said[: len(row.answer)])
        assert (row.finish == "length") == (len(row.answer) == MAX_TOKENS)
        assert (row.finish == "stop") == (row.answer[-1] == EOS)
    assert {row.finish for row in greedy} == {"stop", "length"}, "some ending is not shown"


def test_sampled_rows_draw_from_the_targets_law_with_their_own_seed(answered, pair):
    sampled = [row for row in answered.values() if row.temperature > 0]
    assert 3 <= len(sampled) <= 13, "about half, as asked"
    assert {(row.temperature, row.top_p) for row in sampled} == {(0.6, 0.95)}
    assert len({row.seed for row in sampled}) == len(sampled)
    for row in sampled[:4]:
        sampler = Sampler(SamplingConfig(0.6, 0.95, seed=row.seed))
        draws = enumerate(plain_logits(pair.target, row), len(row.prompt))
        assert row.answer == tuple(sampler.sample(at, i, []).item() for i, at in draws)


def plain_logits(target: Target, row: CorpusRow) -> mx.array:
    """Before each token of the answer [n, V], all from one pass."""
    tokens = mx.array([*row.prompt, *row.answer[:-1]])
    logits, _ = target.forward(tokens, target.new_cache(), Block(len(tokens)))
    return logits[len(row.prompt) - 1 :]


def test_drafts_change_no_answer(folder, tmp_path, answered, capsys):
    drafter = ["--drafter", str(write_drafter(tmp_path / "drafter"))]
    for i, more in enumerate((["--method", "none"], [*drafter, "--method", "d2sd"], drafter)):
        rows = run(folder, tmp_path / str(i), "--limit", "6", *more)
        assert len(rows) == 6 and all(answered[row.id] == row for row in rows)
        assert "prompt lookup" not in capsys.readouterr().err
    assert {(tmp_path / str(i)).read_bytes().splitlines()[0] for i in range(3)} == {
        (folder / "answered.jsonl").read_bytes().splitlines()[0]
    }, "one may go on with another method"


def test_another_seed_changes_order_and_draws_and_a_larger_limit_goes_on(
    folder, tmp_path, answered
):
    rows = run(folder, tmp_path / "c", "--seed", "1", "--limit", "6")
    first = run(folder, tmp_path / "d", "--limit", "6")
    assert {row.id for row in rows} != {row.id for row in first}
    assert any(row.seed != answered[row.id].seed for row in rows)
    more = run(folder, tmp_path / "d", "--limit", "16")
    assert more[:6] == first and by_id(more) == answered


def test_prompts_may_be_plain_text_without_ids(folder, tmp_path):
    prompts = [{"category": "chat", "prompt": f"say {i}"} for i in range(3)]
    file = write_prompts(tmp_path / "prompts.jsonl", prompts)
    more = ["--prompts", str(file), "--max-tokens", "3"]
    rows = run(folder, tmp_path / "c", *more)
    before = (tmp_path / "c").read_bytes()
    assert run(folder, tmp_path / "c", *more) == rows and len({row.id for row in rows}) == 3
    assert (tmp_path / "c").read_bytes() == before, "a run that is repeated adds nothing"


def test_a_system_prompt_comes_first_and_an_answer_ends_where_the_context_does(
    folder, tmp_path, pair
):
    nearly = {**PROMPTS[0], "messages": [{"role": "user", "content": "x" * 450}]}
    file = write_prompts(tmp_path / "p.jsonl", [nearly])
    more = ["--prompts", str(file), "--greedy-share", "0", "--system", "Be brief."]
    (row,) = run(folder, tmp_path / "c", *more)
    assert "system\nBe brief." in pair.tokenizer.decode(row.prompt)
    assert len(row.prompt) + len(row.answer) <= 512 < len(row.prompt) + MAX_TOKENS


def test_a_killed_run_is_continued_without_loss_or_repetition(folder, tmp_path, answered):
    out = tmp_path / "c"
    words = [*options(folder, out), "--batch-size", "1", "--method", "none"]
    command, heard = [sys.executable, "-m", "dflash_mlx.corpus", *words], b""
    with subprocess.Popen(command, stderr=PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        while not re.search(rb"[1-9]\d*/16 ", heard) and (byte := process.stderr.read(1)):
            heard += byte
        process.kill()
    assert process.returncode == -signal.SIGKILL, heard
    finished = read_rows(out)
    assert 0 < len(finished) < len(PROMPTS), "it was killed too late"
    rows = run(folder, out)
    assert rows[: len(finished)] == finished
    assert by_id(rows) == answered


# Refusals


def test_prompts_longer_than_the_context_are_left_out_and_counted(folder, tmp_path, capsys):
    long = {**PROMPTS[0], "id": "long", "messages": [{"role": "user", "content": "x" * 600}]}
    file = write_prompts(tmp_path / "some.jsonl", [*PROMPTS[:3], long])
    more = ["--max-tokens", "2", "--prompts", str(file)]
    assert by_id(run(folder, tmp_path / "c", *more)).keys() == {"p0", "p1", "p2"}
    assert "1 prompts were longer than the context" in capsys.readouterr().out
    write_prompts(file, [long])
    with pytest.raises(DFlashError, match="of the 1 prompts .* 512 tokens"):
        run(folder, tmp_path / "d", *more)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--out", "notes.txt"], "notes.txt exists"),
        (["--self-prompt", "3"], "one source of prompts"),
        (["--opening", "Say"], "--self-prompt"),
        (["--drafter", "nowhere", "--method", "none"], "drafter is nowhere"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    folder, tmp_path, monkeypatch, more, named
):
    monkeypatch.setattr(cli, "load_pair", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DFlashError, match=named) as failure:
        run(folder, tmp_path / "c", *more)
    assert failure.value.next_step
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_is_continued_with_the_same_settings_and_each_id_stands_for_one_prompt(
    folder, tmp_path, answered
):
    out, file = folder / "answered.jsonl", str(tmp_path / "p.jsonl")
    contents = out.read_bytes()
    with pytest.raises(DFlashError, match="system None, not 'Be brief.'"):
        run(folder, out, "--system", "Be brief.")
    write_prompts(tmp_path / "p.jsonl", [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    with pytest.raises(DFlashError, match="'p0'"):
        run(folder, tmp_path / "c", "--prompts", file)
    write_prompts(tmp_path / "p.jsonl", [{**PROMPTS[0], "messages": PROMPTS[1]["messages"]}])
    with pytest.raises(DFlashError, match="answer to another prompt with the id 'p0'"):
        run(folder, out, "--prompts", file)
    assert out.read_bytes() == contents


# Many at once


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_models_with_sliding_windows_answer_as_they_do_alone(name):
    target = Target(make_model(name), 512, name)
    prompts = [random_prompt(i, 5 + 6 * i) for i in range(5)]
    jobs = [job(i, prompt, temperature=0.8, max_tokens=12) for i, prompt in enumerate(prompts)]
    together = {done.key: tuple(done.tokens) for done in answered_by(target, jobs, 5, "ngram")}
    alone = {done.key: tuple(done.tokens) for done in answered_by(target, jobs, 1, "none")}
    assert together == alone
    assert len(set(together.values())) == len(prompts)


def test_answers_that_loop_are_cut_where_plain_decoding_began_to_repeat_itself():
    target = Target(make_model("qwen3"), 512, "qwen3")
    config, looped = DecodeConfig(max_tokens=90), 0
    jobs = [job(i, random_prompt(i, 9)) for i in range(6)]
    for done in answered_by(target, jobs, 4, "ngram"):
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
    assert len(answered_by(target, jobs, 12, "none")) == 12
    assert rows[0] == 5 * 500, "the others wait until these are read"
    assert max(rows) <= rows[0] + len(jobs), "and those who decode have a row each"


@cache
def tokenizer() -> Any:
    with TemporaryDirectory() as folder:
        return load_target(str(write_model(Path(folder)))).tokenizer


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist())


def job(key: int, prompt: tuple[int, ...], temperature: float = 0.0, max_tokens: int = 90) -> Job:
    sampling = SamplingConfig(temperature, 0.9, seed=key)
    return Job(key, prompt, max_tokens, sampling)


def answered_by(target: Target, jobs: Sequence[Job], most: int, method: str) -> list[Job]:
    answers = Answers(Pair(target, tokenizer()), method, most)
    answers.waiting.extend(replace(job, tokens=[]) for job in jobs)
    found = [done for step in answers.run() for done in step]
    assert answers.generated >= sum(len(done.tokens) for done in found)
    assert answers.tokens_per_round >= 1
    return found


def test_a_loop_is_cut_after_its_first_repetition():
    before = [1, 2, 3, 4, 5]
    for period in (1, 9, 32):
        cycle = list(range(100, 100 + period))
        answer = before + (cycle * 40)[: max(3 * period, 24)]
        assert loop_end(answer[:-1]) is None
        assert answer[: loop_end(answer)] == before + cycle * 2
    numbers = random.Random(0)
    assert loop_end([]) is None
    assert loop_end([numbers.randrange(3) for _ in range(300)]) is None
    assert loop_end(list(range(33)) * 5) is None, "too long a cycle"
    assert loop_end([5] * 40 + [6]) is None, "it has ended"


# What the chat's drafts may come from


def test_answers_that_are_learned_are_found_by_the_next_program(folder, answered, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    collect.main(["--model", str(folder / "model"), "--learn", str(folder / "answered.jsonl")])
    pair = load(str(folder / "model"))
    store = earlier_texts(PrefixConfig()).of(pair.target.name, pair.tokenizer)
    assert store is not None and store.wait(30)
    row = max(answered.values(), key=lambda row: len(row.answer))
    said = np.array((row.prompt + row.answer)[-2:-10:-1], np.dtype(">u4"))
    assert (8, [row.answer[-1]]) in [(m.length, [*m.ahead[:1]]) for m in store.find(said)]


def test_another_models_answers_are_refused(folder, answered, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = (folder / "answered.jsonl").read_text().splitlines()
    head = json.loads(rows[0])
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([json.dumps({**head, "vocab_size": 7}), *rows[1:]]) + "\n")
    with pytest.raises(DFlashError, match="other.jsonl"):
        collect.main(["--model", str(folder / "model"), "--learn", str(other)])
    (tmp_path / "talks").mkdir()
    with pytest.raises(DFlashError, match="no answer of"):
        collect.main(["--model", str(folder / "model"), "--learn", str(tmp_path / "talks")])
    assert not list(tmp_path.rglob("*.texts"))
