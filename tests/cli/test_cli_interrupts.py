"""Ctrl+C at any moment, and closed descriptors: 130 or one sentence, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import COMMANDS, words_of
from support.interrupts import ROOT, begin, end_of, prepare
from support.models import write_endless_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("interrupts") / "model")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    prepare(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"category": "a", "prompt": "hello"}\n')
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("at", [1, 700])
def test_an_interrupted_import_is_130_and_no_traceback(place, model, command, at):
    end = end_of(begin(words_of(command, model, place), place, at))
    assert end.problem == ""
    assert not (place / "out").exists() and list((place / "temporary").iterdir()) == []


@pytest.mark.parametrize("command", ["generate", "dflash-chat"])
def test_an_interrupted_answer_ends_with_130(place, model, command):
    process = begin(words_of(command, model, place)[:-1] + [100_000], place)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    end = end_of(process, first)
    assert end.problem == "" and end.out.endswith("\n")


INTERRUPTED = """import os, signal
from dflash_mlx.cli import options

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def main(_):
    {}
    print("went on")

options.run(main, "dflash-chat")
"""
CHANGED = """try:
        interrupt()
    except BaseException:
        raise ImportError("no such module")"""
TIDIED = """try:
        interrupt()
    finally:
        print("tidied")"""


@pytest.mark.parametrize(
    ("code", "out"),
    [
        (CHANGED, ""),
        (TIDIED, "tidied\n"),
    ],
    ids=["another exception", "tidying up"],
)
def test_an_interrupt_that_a_library_tells_in_other_words_is_one(place, code, out):
    (place / "dflash-chat").write_text(INTERRUPTED.format(code))
    end = end_of(begin([place / "dflash-chat"], place))
    assert (end.problem, end.out) == ("", out)


def test_a_program_that_imports_the_package_keeps_its_own_ctrl_c():
    script = "import signal, dflash_mlx; print(signal.getsignal(signal.SIGINT).__name__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, "-m", "dflash_mlx.generate"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "default_int_handler\n"


CLOSED = {
    "nothing to read for the chat": ("dflash-chat", [], "<&-", 2, "the prompt is empty"),
    "nothing to read": ("generate", ["--prompt", "-"], "<&-", 2, "the prompt is empty"),
    "no input, but a prompt": ("generate", ["--prompt", "hello"], "<&-", 0, ""),
    "nowhere to write": ("generate", ["--prompt", "hello"], ">&-", 0, ""),
    "nowhere to complain": ("generate", ["--prompt", "hello"], "2>&-", 0, ""),
    "nothing at all": ("generate", ["--prompt", "hello"], "<&- >&- 2>&-", 0, ""),
}


@pytest.mark.parametrize("case", CLOSED)
def test_closed_descriptors_are_as_if_they_led_nowhere(place, model, case):
    command, options, closing, code, said = CLOSED[case]
    start = [place / command] if command == "dflash-chat" else ["-m", f"dflash_mlx.{command}"]
    more = [*options, "--method", "none", "--max-tokens", "4", "--model", model]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closing}', "sh", sys.executable, *map(str, [*start, *more])],
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.pathsep.join(sys.path)}"},
        check=False,
    )
    assert done.returncode == code and said in done.stderr
    assert "went wrong" not in done.stderr
    if ">&-" not in closing and code == 0:
        assert len(done.stdout) > 1


def test_json_that_is_nested_too_deeply_is_bad_input_everywhere(place, model):
    (place / "deep.json").write_text("[" * 100_000)
    chosen = ["--model", model]
    for words in (
        ["-m", "dflash_mlx.generate", *chosen, "--messages", "deep.json"],
        ["-m", "dflash_mlx.benchmark", *chosen, "--prompts", "deep.json"],
        ["-m", "dflash_mlx.corpus", *chosen, "--self-prompt", "1", "--out", "out"]
        + ["--openings", "deep.json"],
        ["-m", "dflash_mlx.generate", *chosen, "--prompt", "x", "--template", "a=" + "[" * 100_000],
    ):
        end = end_of(begin(words, place))
        assert end.code == 2 and len(end.err.splitlines()) == 1
        assert "deep.json" in end.err or "--template" in end.err


def test_messages_of_other_programs_are_understood(place, model):
    parts = [{"type": "text", "text": "hello"}]
    asked = json.dumps([{"role": "user", "content": parts}])
    (place / "asked.json").write_text(asked, encoding="utf-8-sig")
    options = ["--messages", "asked.json", "--max-tokens", "2", "--method", "none"]
    end = end_of(begin(["-m", "dflash_mlx.generate", "--model", model, *options], place))
    assert end.code == 0
