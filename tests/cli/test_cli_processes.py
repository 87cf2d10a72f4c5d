"""Commands as processes of their own: Ctrl+C at any moment, pipes, closed descriptors, full disks.

When Ctrl+C comes is counted by the program itself, so no clock decides what a test finds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.models import write_endless_model

ROOT = Path(__file__).parents[2]
# As sitecustomize.py, which Python imports before anything of ours. The module is imported right
# behind the first thing that a command does.
COUNTER = """
import os, signal, sys

class Counter:
    left = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if cls.left is None and name == "dflash_mlx.system.blas":
            cls.left = int(os.environ["INTERRUPT_AT"])
        if cls.left is not None:
            cls.left -= 1
            if cls.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Counter)
"""
CHAT = "from dflash_chat.main import main\nmain()\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("processes") / "model")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "sitecustomize.py").write_text(COUNTER)
    (tmp_path / "dflash-chat").write_text(CHAT)
    return tmp_path


def run(
    place: Path, *words: object, at: int = 0, shell: str = "", interrupt: bool = False
) -> tuple[int, str, str]:
    """Python with `words`: its code as a shell tells it, and what it said.

    at: the import to be interrupted at. shell: what goes behind. interrupt: once it has said one
    character, which is not told.
    """
    start: Sequence[str] = ["sh", "-c", f'exec "$@" {shell}', "sh"] if shell else []
    path = os.pathsep.join(map(str, (place, ROOT, *filter(None, sys.path))))
    changed = {"PYTHONPATH": path, "INTERRUPT_AT": str(at), "HF_HUB_OFFLINE": "1"}
    changed |= {"XDG_CACHE_HOME": str(place / "cache"), "TMPDIR": str(place / "temporary")}
    with subprocess.Popen(
        [*start, sys.executable, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env={**os.environ, **changed},
    ) as process:
        try:
            if interrupt:
                assert process.stdout is not None and process.stdout.read(1)
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()  # nothing where it has ended
    code = process.returncode
    return 128 - code if code < 0 else code, out, err


def words_of(command: str, model: Path, tokens: int = 3000) -> list[object]:
    """What would succeed, or work for long."""
    more = {"train": ["--corpus", "rows.jsonl", "--out", "out"], "serve": ["--port", "0"]}
    answer = ["--prompt", "hello", "--method", "none", "--max-tokens", tokens]
    start: list[object] = ["-m", f"dflash_mlx.{command}"]
    start = ["dflash-chat"] if command == "dflash-chat" else start
    return [*start, "--model", model, *more.get(command, answer)]


@pytest.mark.parametrize(
    "interrupted",
    ["generate 1", "generate 600", "dflash-chat 1", "dflash-chat 700", "serve 700", "train 300"],
)
def test_an_interrupted_import_is_130_without_a_word(place, model, interrupted):
    command, at = interrupted.split()
    code, out, err = run(place, *words_of(command, model), at=int(at))
    said = [line for line in err.splitlines() if line and "[transformers]" not in line]
    assert (code, out, said) == (130, "", [])
    assert not (place / "out").exists() and list((place / "temporary").iterdir()) == []


def test_an_interrupted_answer_ends_its_line_and_is_130(place, model):
    code, out, err = run(place, *words_of("generate", model, 100_000), interrupt=True)
    assert code == 130 and out.endswith("\n") and "Traceback" not in err


def test_a_program_that_imports_the_package_keeps_its_own_ctrl_c(place):
    script = "import signal, dflash_mlx; print(signal.getsignal(signal.SIGINT).__name__)"
    assert run(place, "-c", script, "-m", "dflash_mlx.generate")[1] == "default_int_handler\n"


@pytest.mark.parametrize(
    ("command", "closed", "code", "said"),
    [
        ("dflash-chat", "<&-", 2, "the prompt is empty"),
        ("generate", ">&-", 0, ""),
        ("generate", "<&- >&- 2>&-", 0, ""),
    ],
)
def test_closed_descriptors_are_as_if_they_led_nowhere(place, model, command, closed, code, said):
    words = words_of(command, model, 4)
    if code:
        words[words.index("--prompt") + 1] = "-"
    ended, _, err = run(place, *words, shell=closed)
    assert ended == code and said in err and "went wrong" not in err


def test_a_process_answers_utf8_from_a_pipe_to_a_reader_that_leaves_early(place, model):
    (place / "asked").write_text("héllo")
    words = words_of("generate", model, 100)
    words[words.index("--prompt") + 1] = "-"
    code, out, err = run(place, *words, shell="<asked | head -c 1")
    assert (code, len(out)) == (0, 1) and "Error" not in err
    code, out, err = run(place, *words, "--json", shell="<asked")
    assert (code, json.loads(out)["generated_tokens"]) == (0, 100)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence(place):
    script = "from dflash_mlx.cli import options; options.run(lambda _: print('x' * 99999), 'me')"
    code, _, err = run(place, "-c", script, shell=">/dev/full")
    assert code == 2 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("me: ") and "No space left" in err
