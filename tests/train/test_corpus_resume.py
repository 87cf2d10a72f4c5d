"""A run that was stopped, however, goes on with nothing lost and nothing made twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.corpus.rows import CorpusRow, read_rows
from support.corpora import PROMPTS, by_id, options, run, write_prompts
from support.models import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    write_model(root / "model")
    write_prompts(root / "prompts.jsonl")
    return root


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, CorpusRow]:
    return by_id(run(folder, folder / "answered.jsonl"))


def test_a_run_that_is_repeated_adds_nothing(folder, tmp_path):
    rows = run(folder, tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    assert run(folder, tmp_path / "c") == rows
    assert (tmp_path / "c").read_bytes() == before


@pytest.mark.parametrize("lines", [1, 2, 9])
def test_a_file_cut_anywhere_is_completed(folder, tmp_path, answered, lines):
    whole = (folder / "answered.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "c").write_bytes(b"".join(whole[:lines]) + whole[lines][:17])
    rows = run(folder, tmp_path / "c", "--batch-size", "5")
    assert by_id(rows) == answered
    kept = (tmp_path / "c").read_bytes().splitlines(keepends=True)
    assert kept[:lines] == whole[:lines]


def test_a_larger_limit_goes_on_where_the_smaller_ended(folder, tmp_path, answered):
    few = run(folder, tmp_path / "c", "--limit", "5")
    assert len(few) == 5
    rows = run(folder, tmp_path / "c", "--limit", "24")
    assert rows[:5] == few
    assert by_id(rows) == answered


def test_a_killed_run_is_continued_without_loss_or_repetition(folder, tmp_path, answered):
    out = tmp_path / "c"
    command = [sys.executable, "-m", "dflash_mlx.corpus", *options(folder, out)]
    command += ["--batch-size", "1"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=dict(os.environ)
    )
    assert process.stderr is not None
    heard = b""
    while not re.search(rb"[1-9]\d*/24 ", heard) and (byte := process.stderr.read(1)):
        heard += byte
    os.kill(process.pid, signal.SIGKILL)
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL, heard
    finished = read_rows(out)[1]
    assert 0 < len(finished) < len(PROMPTS), "it was killed too late"
    rows = run(folder, out)
    assert rows[: len(finished)] == finished
    assert by_id(rows) == answered


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-tokens", "41"], "max_tokens 40, not 41"),
        (["--temperature", "0.7"], "temperature 0.6, not 0.7"),
        (["--greedy-share", "0.9"], "greedy_share 0.5, not 0.9"),
        (["--seed", "5"], "seed 0, not 5"),
        (["--system", "Be brief."], "system None, not 'Be brief.'"),
    ],
)
def test_other_settings_do_not_continue_a_file(folder, answered, more, message):
    before = (folder / "answered.jsonl").read_bytes()
    with pytest.raises(DFlashError, match=message):
        run(folder, folder / "answered.jsonl", *more)
    assert (folder / "answered.jsonl").read_bytes() == before


def test_another_prompt_with_the_id_of_an_answered_one_is_refused(folder, tmp_path):
    run(folder, tmp_path / "c", "--limit", "3")
    prompts = [
        {**prompt, "prompt": "new", "messages": PROMPTS[0]["messages"]} for prompt in PROMPTS
    ]
    file = write_prompts(tmp_path / "prompts.jsonl", prompts)
    with pytest.raises(DFlashError, match="answer to another prompt with the id 'p"):
        run(folder, tmp_path / "c", "--prompts", str(file))
