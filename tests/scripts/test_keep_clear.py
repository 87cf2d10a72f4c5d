"""Prompts that keep clear of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import keep_clear
import pytest

from dflash_mlx.core.errors import DFlashError

SENTENCE = "Write a solution to the following problem and make sure that it passes the tests:"


def write(file: Path, *texts: str) -> str:
    rows = [{"id": str(i), "category": "any", "prompt": text} for i, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_what_has_a_name_or_eight_words_of_the_evaluation_is_dropped_and_twins_come_once(
    tmp_path, monkeypatch
):
    kept = ["a b c d e f g h", "Why jazz?", "def f(x): pass", f"{SENTENCE} alpha beta", "..."]
    near = ["x A b, c d e f g\nh y", "why jazz", "def  f(y): return 1"]
    clear = ["x a b c d e f g", "why jazz now", "f(x)", f"{SENTENCE} gamma delta", "!"]
    write(tmp_path / "one.jsonl", *near, *clear)
    write(tmp_path / "two.jsonl", clear[0], "another")
    evaluation = write(tmp_path / "eval.jsonl", *kept)
    monkeypatch.chdir(tmp_path)
    files = ["--prompts", "one.jsonl", "--prompts", "two.jsonl", "--out", "out.jsonl"]
    keep_clear.main([*files, "--of", evaluation])
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == [*clear, "another"]
    assert [row["id"] for row in rows] == ["3", "4", "5", "6", "7", "1"]


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--prompts", "some.jsonl", "--of", "none.jsonl"], "none.jsonl"),
        (["--prompts", "some.jsonl", "--of", "some.jsonl"], "every prompt"),
        (["--prompts", "out.jsonl"], "out.jsonl"),
    ],
)
def test_bad_input_is_refused_and_the_file_is_left_alone(tmp_path, monkeypatch, options, value):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "some.jsonl", "a prompt")
    before = write(tmp_path / "out.jsonl", "what was there")
    with pytest.raises(DFlashError, match=value):
        keep_clear.main([*options, "--out", "out.jsonl"])
    assert "what was there" in Path(before).read_text()
