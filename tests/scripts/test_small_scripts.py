"""Small scripts and settings: what the wheel holds, the house counted, prompts that keep clear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keep_clear
import pytest

from dflash_mlx.core.errors import DFlashError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FILES = {
    "dflash_mlx/__init__.py": "from dflash_mlx.engine import decode",
    "dflash_mlx/doctor.py": "from dflash_mlx.cli import doctor",
    "dflash_mlx/flat.py": "def f():\n    from dflash_mlx.engine import decode",
    "dflash_mlx/cli/doctor.py": "import dflash_mlx.engine.decode\nimport mlx.core",
    "dflash_mlx/engine/decode.py": "from kernels_metal import kernel",
    "kernels_metal/kernel.py": "if TYPE_CHECKING:\n    import dflash_mlx.flat",
    "app/main.py": "from dflash_mlx import flat",
    "tests/test_decode.py": "import dflash_mlx\n" * 7,
}
CONTRACT = """
[[tool.importlinter.contracts]]
type = "layers"
containers = ["dflash_mlx"]
layers = ["cli | engine", "flat"]
"""


def test_rooms_floors_and_arrows_are_counted(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "pyproject.toml").write_text(CONTRACT)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "app" / "unknown.py").write_text("from dflash_mlx.cli import doctor\n")
    command = [sys.executable, ROOT / "scripts" / "house.py", tmp_path, "--json", "--lines"]
    found = json.loads(subprocess.check_output(command))
    lines = found.pop("lines")
    assert found == {
        "rooms": 6,  # dflash_mlx with its door, flat, cli, engine, kernels_metal, dflash_chat
        "floors": 4,  # app or dflash_mlx, flat or cli, engine, kernels
        "arrows": 6,
        "arrows up": 1,  # from flat to engine, against the contract
        "modules flat": 2,
    }
    assert lines["dflash_mlx"] == 4 and lines["tests"] == 8 and lines["app"] == 1


def test_the_wheel_has_every_folder_of_code_but_the_emulator():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    files = [
        file for name in ("dflash_mlx", "kernels_metal") for file in ROOT.glob(f"{name}/**/*.py")
    ]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    left_out = {name for name in found if name.startswith("kernels_metal.emulator")}
    assert left_out and {*settings["packages"]} == {*found, "dflash_chat"} - left_out


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


def test_what_schemas_need_comes_with_the_server():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert any(each.startswith("llguidance") for each in extras["optional-dependencies"]["serve"])
