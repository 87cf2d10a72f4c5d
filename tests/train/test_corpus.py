"""The target's answers: plain decoding's own, whatever the batch, and none lost or made twice."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import DecodeConfig, Pair, Session, load
from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.sampling import Sampler
from dflash_mlx.train.config import CorpusConfig
from dflash_mlx.train.corpus import collect
from dflash_mlx.train.corpus.rows import CorpusRow, read_rows
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
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


def test_every_prompt_is_answered_once(answered, pair):
    assert answered.keys() == {prompt["id"] for prompt in PROMPTS}
    for prompt in PROMPTS:
        expected = pair.tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True
        )
        assert answered[prompt["id"]].prompt == tuple(expected)
        assert answered[prompt["id"]].category == "chat"


def test_greedy_rows_are_what_plain_decoding_says(answered, pair):
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
        assert "n-gram" not in capsys.readouterr().err
    assert {(tmp_path / str(i)).read_bytes().splitlines()[0] for i in range(3)} == {
        (folder / "answered.jsonl").read_bytes().splitlines()[0]
    }, "one may go on with another method"


def test_the_share_of_greedy_rows_is_as_asked(folder, tmp_path, answered):
    assert 3 <= sum(row.temperature == 0 for row in answered.values()) <= 13
    for share in ("0", "1"):
        rows = run(folder, tmp_path / share, "--greedy-share", share, "--max-tokens", "1")
        assert {row.temperature == 0 for row in rows} == {share == "1"}


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


# Going on


@pytest.mark.parametrize("lines", [1, 9])
def test_a_file_cut_anywhere_is_completed(folder, tmp_path, answered, lines):
    whole = (folder / "answered.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "c").write_bytes(b"".join(whole[:lines]) + whole[lines][:17])
    assert by_id(run(folder, tmp_path / "c", "--batch-size", "5")) == answered
    assert (tmp_path / "c").read_bytes().splitlines(keepends=True)[:lines] == whole[:lines]


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


@pytest.mark.parametrize(
    ("option", "value", "before"),
    [("max_tokens", 41, 40), ("seed", 5, 0), ("system", "Be brief.", None)],
)
def test_other_settings_do_not_continue_a_file(folder, answered, option, value, before):
    contents = (folder / "answered.jsonl").read_bytes()
    more = ["--" + option.replace("_", "-"), str(value)]
    with pytest.raises(DFlashError, match=f"{option} {before!r}, not {value!r}"):
        run(folder, folder / "answered.jsonl", *more)
    assert (folder / "answered.jsonl").read_bytes() == contents


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
        (["--out", "nowhere/c.jsonl"], "nowhere/c.jsonl"),
        (["--out", "."], "written"),
        (["--out", "notes.txt"], "notes.txt exists"),
        (["--self-prompt", "3"], "one source of prompts"),
        (["--opening", "Say"], "--self-prompt"),
        (["--limit", "0"], "limit is 0"),
        (["--greedy-share", "1.5"], "greedy_share is 1.5"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "11"], "temperature is 11"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--drafter", "nowhere", "--method", "none"], "drafter is nowhere"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    folder, tmp_path, monkeypatch, more, named
):
    monkeypatch.setattr(collect, "load_pair", lambda *_: pytest.fail("the pair was loaded"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DFlashError, match=named) as failure:
        run(folder, tmp_path / "c", *more)
    assert failure.value.next_step
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_id_stands_for_one_prompt(folder, tmp_path, answered):
    file = write_prompts(tmp_path / "p.jsonl", [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    with pytest.raises(DFlashError, match="'p0'"):
        run(folder, tmp_path / "c", "--prompts", str(file))
    write_prompts(file, [{**PROMPTS[0], "messages": PROMPTS[1]["messages"]}])
    with pytest.raises(DFlashError, match="answer to another prompt with the id 'p0'"):
        run(folder, folder / "answered.jsonl", "--prompts", str(file))


def test_the_settings_refuse_a_text_where_texts_belong():
    with pytest.raises(DFlashError, match="opening is 'Say'"):
        CorpusConfig(opening="Say")  # type: ignore[arg-type]
