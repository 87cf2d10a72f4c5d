"""The target's answers: plain decoding's own, whatever the batch, and none lost or made twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DecodeConfig, Pair, Session, load
from dflash_mlx.core.config import CorpusConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target
from dflash_mlx.train.corpus.batch import draw
from dflash_mlx.train.corpus.rows import Row
from support.corpora import (
    MAX_TOKENS,
    PROMPTS,
    by_id,
    corpus,
    options,
    run,
    write_folder,
    write_prompts,
)
from support.models import EOS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load(str(folder / "model"))


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, Row]:
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
        uniform = np.random.default_rng(row.seed)
        assert row.answer == tuple(
            draw(logprobs, 0.6, 0.95, uniform.random()) for logprobs in plain_law(pair.target, row)
        )


def plain_law(target: Target, row: Row) -> np.ndarray:
    """Log-probabilities before each token of the answer, all from one pass."""
    tokens = mx.array([*row.prompt, *row.answer[:-1]])
    logits, _ = target.forward(tokens, target.new_cache(), Block(len(tokens)))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(logprobs[len(row.prompt) - 1 :])


def test_the_share_of_greedy_rows_is_as_asked(folder, tmp_path, answered):
    assert 5 <= sum(row.temperature == 0 for row in answered.values()) <= 19
    for share in ("0", "1"):
        rows = run(folder, tmp_path / share, "--greedy-share", share, "--max-tokens", "1")
        assert {row.temperature == 0 for row in rows} == {share == "1"}


@pytest.mark.parametrize("size", ["1", "3", "100"])
def test_the_batch_changes_no_answer(folder, tmp_path, answered, size):
    assert by_id(run(folder, tmp_path / "c", "--batch-size", size)) == answered


def test_another_seed_changes_order_and_draws(folder, tmp_path, answered):
    rows = run(folder, tmp_path / "c", "--seed", "1", "--limit", "6")
    first = run(folder, tmp_path / "d", "--limit", "6")
    assert {row.id for row in rows} != {row.id for row in first}
    assert [answered[row.id] for row in first] == first
    assert any(row.seed != answered[row.id].seed for row in rows)


def test_prompts_may_be_plain_text_without_ids(folder, tmp_path):
    prompts = [{"category": "chat", "prompt": f"say {i}"} for i in range(3)]
    file = write_prompts(tmp_path / "prompts.jsonl", prompts)
    more = ["--prompts", str(file), "--max-tokens", "3"]
    rows = run(folder, tmp_path / "c", *more)
    assert run(folder, tmp_path / "c", *more) == rows
    assert len({row.id for row in rows}) == 3


def test_a_system_prompt_comes_before_every_prompt(folder, tmp_path, pair):
    (row, *_) = run(folder, tmp_path / "c", "--system", "Be brief.", "--max-tokens", "1")
    assert "system\nBe brief." in pair.tokenizer.decode(row.prompt)


# Refusals


def test_prompts_longer_than_the_context_are_left_out_and_counted(folder, tmp_path, capsys):
    long = {**PROMPTS[0], "id": "long", "prompt": None}
    long["messages"] = [{"role": "user", "content": "x" * 600}]
    file = write_prompts(tmp_path / "some.jsonl", [*PROMPTS[:3], long])
    more = ["--max-tokens", "2", "--prompts", str(file)]
    assert by_id(run(folder, tmp_path / "c", *more)).keys() == {"p0", "p1", "p2"}
    assert "1 prompts were longer than the context" in capsys.readouterr().out
    write_prompts(file, [long])
    with pytest.raises(DFlashError, match="none of the 1 prompts fits .* 512 tokens"):
        run(folder, tmp_path / "d", *more)


def test_an_answer_ends_where_the_context_does(folder, tmp_path):
    nearly = {**PROMPTS[0], "messages": [{"role": "user", "content": "x" * 480}]}
    file = write_prompts(tmp_path / "p.jsonl", [nearly])
    (row,) = run(folder, tmp_path / "c", "--prompts", str(file), "--greedy-share", "0")
    assert len(row.prompt) + len(row.answer) <= 512


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_pair(*_: Any) -> Any:
        raise AssertionError("the pair was loaded")

    monkeypatch.setattr(corpus, "load_target", load_pair)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--prompts", "empty.jsonl"], "empty.jsonl holds no prompts"),
        (["--out", "nowhere/c.jsonl"], "nowhere/c.jsonl cannot be written"),
        (["--out", "."], "cannot be written"),
        (["--out", "prompts.jsonl"], "prompts.jsonl exists and does not begin"),
        (["--out", "notes.txt"], "notes.txt exists and does not begin"),
        (["--self-prompt", "3"], "one source of prompts"),
        (["--opening", "Say"], "--self-prompt"),
        (["--limit", "0"], "limit is 0"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--greedy-share", "1.5"], "greedy_share is 1.5"),
        (["--temperature", "0"], "temperature is 0.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--seed", "-1"], "seed is -1"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    folder, tmp_path, monkeypatch, more, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("mine")
    write_prompts(tmp_path / "prompts.jsonl")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(DFlashError, match=message) as failure:
        corpus.main(options(folder, tmp_path / "c", *more))
    assert failure.value.next_step
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_two_prompts_with_one_id_are_refused(folder, tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    with pytest.raises(DFlashError, match="two prompts have the id 'p0'"):
        run(folder, tmp_path / "c", "--prompts", str(file))


def test_the_settings_refuse_a_text_where_texts_belong():
    with pytest.raises(DFlashError, match="opening is 'Say'"):
        CorpusConfig(opening="Say")  # type: ignore[arg-type]
