"""The command lines as processes of their own: exit codes, pipes, full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.models import write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_model(tmp_path_factory.mktemp("processes") / "model")
    return ["-m", "dflash_mlx.generate", "--model", str(folder), "--method", "none"]


def process(*argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv],
        input=stdin,
        capture_output=True,
        cwd=ROOT,
        env=environment,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", "hello", "--temperature", "-1"], b"temperature is -1.0"),
        (["--prompt", b"hel\xfflo"], b"UTF-8"),
    ],
)
def test_a_process_leaves_with_2_for_bad_input(model, options, said):
    result = process(*model, *options)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"dflash_mlx.generate: ") and said in result.stderr
    assert result.stderr.count(b"\n") == 1


def test_a_process_answers_utf8_from_a_pipe(model):
    options = ["--max-tokens", "8", "--prompt", "-", "--json"]
    result = process(*model, *options, stdin="héllo".encode())
    assert (result.returncode, result.stderr) == (0, b"")
    assert json.loads(result.stdout)["generated_tokens"] == 8


def test_a_reader_that_leaves_early_is_no_error(model):
    arguments = [sys.executable, *model, "--prompt", "hello", "--max-tokens", "100"]
    script = '"$@" | head -c 1; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", script, "bash", *arguments], capture_output=True, cwd=ROOT)
    assert (done.returncode, len(done.stdout)) == (0, 1)
    assert b"Error" not in done.stderr


RUN = "from dflash_mlx.cli import options as cli; cli.run(lambda argv: {}, 'program')"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence():
    script = RUN.format("print('x' * 100_000)")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("program: ") and "No space left" in last
    assert b"Traceback" not in done.stderr


def test_a_fault_of_ours_is_one_sentence_that_names_its_log(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", RUN.format("1 / 0")]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 1
    (log,) = tmp_path.glob("dflash-chat-*.log")
    assert str(log) in done.stderr.decode() and b"Traceback" not in done.stderr
    assert "ZeroDivisionError" in log.read_text()
