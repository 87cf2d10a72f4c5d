"""The script that trains the default drafters: which commands it runs, with which files."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
SETTINGS = ("OWN_PROMPTS", "KEEP_CLEAR_OF", "SELF_PROMPTS", "SELECTOR_MINUTES")
MODULES = {
    "keep_clear.py": "keep_clear",
    "dflash_mlx.train": "dflash_mlx.train.__main__",
}


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
    return root.resolve()


def run(root: Path, *arguments: str, **settings: str) -> tuple[int, list[list[str]]]:
    """The exit code, and the calls without the program that they begin with `python` for."""
    environment = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    environment |= {"CALLS": str(root / "calls"), **settings}
    script = root / "scripts" / "train_default.sh"
    done = subprocess.run([script, *arguments], env=environment, capture_output=True, cwd=root)
    calls = (root / "calls").read_text().splitlines() if (root / "calls").exists() else []
    return done.returncode, [json.loads(call) for call in calls]


def program(call: list[str]) -> str:
    return call[1] if call[0] == "-m" else Path(call[0]).name


def values(call: list[str], option: str) -> list[str]:
    """As paths below the folder that was asked for, where they are some."""
    given = [call[i + 1] for i, word in enumerate(call) if word == option]
    return [value.partition("/out/")[2] or value for value in given]


def test_every_corpus_is_collected_and_every_drafter_trained_on_all_of_them(root):
    settings = {"KEEP_CLEAR_OF": "my eval.jsonl", "SELECTOR_MINUTES": "9"}
    code, calls = run(root, "out", "my prompts.jsonl", **settings)
    assert code == 0
    corpus, train = ["dflash_mlx.corpus"] * 4, "dflash_mlx.train"
    trained = [train, train, f"{train}.selector"]
    assert [program(call) for call in calls] == ["keep_clear.py", *corpus, *trained]
    clear, answers, own, *_, second, selector = calls
    sources = [Path(file).name for file in values(clear, "--prompts")]
    assert (sources, values(clear, "--of")) == (["made.jsonl", "written.jsonl"], ["my eval.jsonl"])
    assert values(answers, "--prompts") == ["my prompts.jsonl"]
    assert values(own, "--prompts") == values(clear, "--out")
    files = [f"{name}.jsonl" for name in ("answers", "own", "code", "chat")]
    assert [values(call, "--out")[0] for call in calls[1:5]] == files
    assert all(values(call, "--corpus") == files for call in calls[5:])
    assert (values(selector, "--cache"), values(selector, "--minutes")) == (["features"], ["9"])
    assert values(second, "--init") == values(selector, "--drafter") == ["dflash"]
    for call in calls:
        parser = importlib.import_module(MODULES.get(program(call), program(call))).parser()
        parser.parse_args(call[2:] if call[0] == "-m" else call[1:])


@pytest.mark.parametrize(("selector", "drafter", "trained"), [(2, 1, 0), (1, 2, 1), (None, 1, 1)])
def test_a_selector_is_trained_again_where_it_is_unfinished_or_its_drafter_newer(
    root, selector, drafter, trained
):
    """selector, drafter: the times of their last files, None where it is not there yet."""
    for file, time in (("dflash/model.safetensors", drafter), ("selected/config.json", selector)):
        (root / "out" / file).parent.mkdir(parents=True)
        if time is not None:
            (root / "out" / file).touch()
            os.utime(root / "out" / file, (time, time))
    _, calls = run(root, "out")
    assert [program(call) for call in calls].count("dflash_mlx.train.selector") == trained


@pytest.mark.parametrize(
    ("arguments", "settings", "corpora", "last"),
    [
        (["out"], {}, ["own", "code", "chat"], "dflash_mlx.train.selector"),
        (
            ["out", "p.jsonl"],
            {"OWN_PROMPTS": "0"},
            ["answers", "code", "chat"],
            "dflash_mlx.train.selector",
        ),
        (["out"], {"SELECTOR_MINUTES": "0"}, ["own", "code", "chat"], "dflash_mlx.train"),
    ],
)
def test_what_is_turned_off_is_left_out(root, arguments, settings, corpora, last):
    _, calls = run(root, *arguments, **settings)
    assert [Path(file).stem for file in values(calls[-1], "--corpus")] == corpora
    assert program(calls[-1]) == last
    assert (program(calls[0]) == "keep_clear.py") == ("own" in corpora)


@pytest.mark.parametrize("failing", ["keep_clear", "variable-prefix", "selector"])
def test_a_step_that_fails_ends_the_script(root, failing):
    code, calls = run(root, "out", FAILS=failing)
    assert code == 2 and failing in " ".join(calls[-1])


def test_what_makes_no_sense_is_refused_before_anything_is_made(root):
    assert run(root) == run(root, "out", OWN_PROMPTS="no") == (2, [])
    assert not (root / "out").exists()
