"""The script that trains the default drafters: which commands it runs, with which files."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mlx.core.config import SelectorTraining

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHORT_VENV = """
venv=${root:?}/.venv
venv_ready() { :; }
fail() { printf '%s\\n' "$*" >&2; exit 2; }
"""
# Writes down what it is called with, and makes the file that is asked for.
SHORT_PYTHON = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if os.environ.get("FAILS", "nothing") in " ".join(sys.argv):
    sys.exit(2)
out = sys.argv[sys.argv.index("--out") + 1] if "--out" in sys.argv else None
if out and not os.path.isdir(out):
    open(out, "a").close()
"""
SETTINGS = ("FUNCTIONS", "CHATS", "WRITTEN", "KEEP_CLEAR_OF", "SELF_PROMPTS", "SELECTOR_MINUTES")


@pytest.fixture
def root(tmp_path):
    """A copy of the script in a repository whose Python only writes down its calls."""
    root = tmp_path / "a repository"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "train_default.sh", root / "scripts")
    (root / "scripts" / "_venv.sh").write_text(SHORT_VENV)
    (root / ".venv" / "bin").mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    python.write_text(SHORT_PYTHON)
    python.chmod(0o755)
    return root


def run(root: Path, *arguments: str, **settings: str) -> tuple[int, list[list[str]]]:
    """The exit code, and the calls without the program that they begin with `python` for."""
    environment = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    environment |= {"CALLS": str(root / "calls"), **settings}
    script = root / "scripts" / "train_default.sh"
    done = subprocess.run([script, *arguments], env=environment, capture_output=True, cwd=root)
    calls = (root / "calls").read_text().splitlines() if (root / "calls").exists() else []
    return done.returncode, [json.loads(call) for call in calls]


def programs(calls: list[list[str]]) -> list[str]:
    return [call[1] if call[0] == "-m" else Path(call[0]).name for call in calls]


def values(call: list[str], option: str) -> list[str]:
    return [call[i + 1] for i, word in enumerate(call) if word == option]


def test_prompts_are_made_first_and_every_corpus_is_trained_on(root):
    code, calls = run(root, "out", "my prompts.jsonl", KEEP_CLEAR_OF="my eval.jsonl", CHATS="7")
    assert code == 0
    corpus, train = "dflash_mlx.corpus", "dflash_mlx.train"
    assert programs(calls) == [
        *("make_prompts.py", *[corpus] * 4),
        *(train, train, f"{train}.selector", f"{train}.compare"),
    ]
    out = root.resolve() / "out"
    made = str(out / "made-prompts.jsonl")
    assert calls[0] == [
        str(root.resolve() / "scripts" / "make_prompts.py"),
        *("--out", made, "--functions", "1500", "--chats", "7"),
        *("--wrap", "my prompts.jsonl", "--written", "--keep-clear-of", "my eval.jsonl"),
    ]
    assert [values(call, "--prompts") for call in calls[1:3]] == [["my prompts.jsonl"], [made]]
    files = [str(out / f"{name}.jsonl") for name in ("answers", "made", "code", "chat")]
    assert [values(call, "--out")[0] for call in calls[1:5]] == files
    assert all(values(call, "--corpus") == files for call in calls[5:])


def test_the_selector_learns_from_the_drafters_answers(root):
    _, calls = run(root, "out", SELECTOR_MINUTES="9")
    out = root.resolve() / "out"
    *_, second, trained, compared = calls
    assert values(trained, "--corpus") == values(second, "--corpus")
    assert values(trained, "--cache") == [str(out / "features")]
    assert values(trained, "--minutes") == ["9"]
    drafters = [str(out / name) for name in ("dflash", "variable-prefix", "selected")]
    assert values(trained, "--drafter") == drafters[:1] and values(trained, "--out") == drafters[2:]
    assert values(compared, "--drafter") == drafters


@pytest.mark.parametrize(("selector", "drafter", "trained"), [(2, 1, 0), (1, 2, 1), (None, 1, 1)])
def test_a_selector_is_trained_again_where_it_is_unfinished_or_its_drafter_newer(
    root, selector, drafter, trained
):
    """selector, drafter: the times of their last files, None where it is not there yet."""
    for folder, file, time in (
        ("dflash", "model.safetensors", drafter),
        ("selected", "config.json", selector),
    ):
        (root / "out" / folder).mkdir(parents=True)
        (root / "out" / folder / "model.safetensors").touch()
        if time is not None:
            (root / "out" / folder / file).touch()
            os.utime(root / "out" / folder / file, (time, time))
    _, calls = run(root, "out")
    assert programs(calls).count("dflash_mlx.train.selector") == trained
    assert len(values(calls[-1], "--drafter")) == 3


def test_the_selector_s_minutes_are_the_command_s_own_by_default(root):
    _, calls = run(root, "out")
    assert values(calls[-2], "--minutes") == [f"{SelectorTraining.minutes:.0f}"]


def test_without_minutes_for_it_there_is_no_selector(root):
    _, calls = run(root, "out", SELECTOR_MINUTES="0")
    assert "dflash_mlx.train.selector" not in programs(calls)
    assert len(values(calls[-1], "--drafter")) == 2


def test_without_a_prompts_file_nothing_is_wrapped(root):
    _, calls = run(root, "out")
    assert calls[0][1:] == [
        *("--out", str(root.resolve() / "out" / "made-prompts.jsonl")),
        *("--functions", "1500", "--chats", "1500", "--written"),
    ]
    names = [Path(file).stem for file in values(calls[-1], "--corpus")]
    assert names == ["made", "code", "chat"]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"WRITTEN": "0"}, ["--functions", "1500", "--chats", "1500"]),
        ({"FUNCTIONS": "0", "CHATS": "0"}, ["--functions", "0", "--chats", "0", "--written"]),
    ],
)
def test_written_prompts_are_made_unless_they_are_turned_off(root, settings, options):
    _, calls = run(root, "out", **settings)
    assert calls[0][3:] == options


def test_another_setting_for_written_prompts_is_refused(root):
    assert run(root, "out", WRITTEN="no") == (2, [])
    assert not (root / "out").exists()


def test_with_zero_of_all_kinds_nothing_is_made(root):
    settings = {"FUNCTIONS": "0", "CHATS": "0", "WRITTEN": "0"}
    _, calls = run(root, "out", "p.jsonl", **settings)
    assert "make_prompts.py" not in programs(calls)
    names = [Path(file).stem for file in values(calls[-1], "--corpus")]
    assert names == ["answers", "code", "chat"]


@pytest.mark.parametrize(
    "failing", ["make_prompts", "made.jsonl", "self-prompt", "variable-prefix", "train.selector"]
)
def test_a_step_that_fails_ends_the_script(root, failing):
    code, calls = run(root, "out", FAILS=failing)
    assert code == 2
    assert failing in " ".join(calls[-1])
    assert "dflash_mlx.train.compare" not in programs(calls)


def test_without_a_folder_it_says_how_it_is_called(root):
    assert run(root) == (2, [])


def test_every_program_understands_its_options(root, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    _, calls = run(root, "out", "p.jsonl", KEEP_CLEAR_OF="e.jsonl")
    for program, call in zip(programs(calls), calls, strict=True):
        options = call[2:] if call[0] == "-m" else call[1:]
        assert isinstance(parser_of(program).parse_args(options), argparse.Namespace)


def parser_of(program: str) -> argparse.ArgumentParser:
    names = {
        "make_prompts.py": "make_prompts",
        "dflash_mlx.corpus": "dflash_mlx.train.corpus.__main__",
        "dflash_mlx.train": "dflash_mlx.train.__main__",
    }
    return importlib.import_module(names.get(program, program)).parser()
