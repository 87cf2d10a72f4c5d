"""The command lines as processes of their own: exit codes, pipes, full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.models import write_drafter, write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("processes")
    return {
        "model": str(write_model(root / "model")),
        "drafter": str(write_drafter(root / "drafter")),
    }


def process(*argv: str, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv],
        input=stdin,
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment,
        timeout=120,
        **options,
    )


def test_a_process_leaves_with_2_for_bad_input():
    result = process("-m", "dflash_mlx.generate", "--prompt", "hello", "--temperature", "-1")
    assert result.returncode == 2
    assert result.stdout == b""
    assert result.stderr.startswith(b"dflash_mlx.generate: temperature is -1.0; ")
    assert result.stderr.count(b"\n") == 1


def test_a_process_leaves_with_2_for_a_prompt_that_is_no_text(folders):
    model = ["--model", folders["model"], "--method", "none"]
    result = process("-m", "dflash_mlx.generate", *model, "--prompt", b"hel\xfflo")
    assert result.returncode == 2
    assert result.stdout == b""
    assert b"Traceback" not in result.stderr


def test_a_process_answers_utf8_from_a_pipe(folders):
    pair = ["--model", folders["model"], "--drafter", folders["drafter"], "--method", "dflash"]
    options = [*pair, "--max-tokens", "8", "--prompt", "-", "--json"]
    arguments = ["-m", "dflash_mlx.generate", *options]
    result = process(*arguments, stdin="héllo".encode())
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["generated_tokens"] == 8


def test_a_reader_that_leaves_early_is_no_error(folders):
    model = ["--model", folders["model"], "--method", "none"]
    arguments = ["-m", "dflash_mlx.generate", *model, "--prompt", "hello", "--max-tokens", "100"]
    script = '"$@" | head -c 1; exit ${PIPESTATUS[0]}'
    result = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, *arguments],
        capture_output=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )
    assert len(result.stdout) == 1
    assert b"Error" not in result.stderr
    assert result.returncode == 0


FULL = "from dflash_mlx.cli.options import run; run(lambda argv: print('x' * 100_000), 'program')"
FAULT = "from dflash_mlx.cli.options import run; run(lambda argv: 1 / 0, 'program')"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", FULL], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("program: ") and "No space left" in last
    assert b"Traceback" not in done.stderr


def test_a_fault_of_ours_is_one_sentence_that_names_its_log(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, env=environment)
    assert done.returncode == 1
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert str(log) in done.stderr.decode() and b"Traceback" not in done.stderr
    assert "ZeroDivisionError" in log.read_text()
