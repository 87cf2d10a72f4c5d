"""What `import dflash_mlx` offers, and what it leaves alone until it is asked for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import dflash_mlx
from dflash_mlx import DecodeConfig, DFlashError, PairConfig, load
from dflash_mlx.cli.options import option_name
from dflash_mlx.client import amount

COUNT = """import sys, dflash_mlx
ours = [name for name in sys.modules if name.partition(".")[0] in ("dflash_mlx", "kernels_metal")]
assert len(ours) <= 90, len(ours)
assert "mlx.core" not in sys.modules
from dflash_mlx import generate, load
others = "benchmark", "cli", "client", "convert", "serve", "train"
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("dflash_mlx.")}
assert rooms.isdisjoint(others), rooms
assert generate.__name__ == "generate" and load.__name__ == "load"
"""


def test_importing_the_package_loads_little_and_its_names_nothing_that_they_do_not_need():
    subprocess.run([sys.executable, "-c", COUNT], check=True)


@pytest.mark.parametrize("name", dflash_mlx.__all__)
def test_a_public_name_can_be_imported(name):
    assert getattr(dflash_mlx, name).__name__ == name


def imported(file: Path, module: str | None = None) -> set[str]:
    """The names that a file imports, all or those of a module."""
    nodes = [
        each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, ast.ImportFrom)
    ]
    found = (each.names for each in nodes if module in (None, each.module))
    return {alias.asname or alias.name for names in found for alias in names}


def test_the_client_has_what_the_app_imports_and_nothing_more():
    root = Path(dflash_mlx.__file__).parent
    files = (root.parent / "app").glob("*.py")
    wanted = set().union(*(imported(file, "dflash_mlx.client") for file in files))
    assert imported(root / "client.py") == wanted


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dflash_mlx.no_such_name


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 kB"), (1500, "1.5 kB"), (98_362_432, "98.4 MB"), (2.28e9, "2.28 GB")],
)
def test_bytes_are_told_in_thousands(count, shown):
    assert amount(count) == shown


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"max_tokens": None}, "max_tokens is None; choose a number"),
        ({"max_tokens": "5"}, "max_tokens is '5'; choose a number"),
        ({"acceptance": None}, "acceptance is None; choose one of"),
        ({"budget": "8"}, "budget is '8'; choose a number"),
        ({"logprobs": True}, "logprobs is True; choose how many"),
        ({"logprobs": -1}, "logprobs is -1; choose how many"),
    ],
)
def test_settings_of_the_wrong_kind_are_refused_at_once(settings, value):
    with pytest.raises(DFlashError, match=value):
        DecodeConfig(**settings)


def test_there_are_few_names_and_a_version():
    assert 12 <= len(dflash_mlx.__all__) <= 15
    assert dflash_mlx.__version__ == version("dflash-chat")


WRONG_CALLS = {
    "a model of another kind": (lambda: load(5), "model is 5; choose a text"),
    "a drafter of another kind": (lambda: load(PairConfig(), 5), "drafter is 5; choose a text"),
    "no such folder": (lambda: load("/no/such"), "'/no/such'; .* with model=$"),
    "no such file": (lambda: load(Path("/no/such")), "'/no/such'; .* with model=$"),
    "a method of another kind": (lambda: DecodeConfig(method=5), "method is 5; choose a text"),
}


@pytest.mark.parametrize(("call", "words"), WRONG_CALLS.values(), ids=[*WRONG_CALLS])
def test_a_wrong_argument_is_named_as_one(call, words):
    with pytest.raises(DFlashError, match=words):
        call()


def test_options_are_arguments_in_python_and_options_on_the_command_line():
    wrong = DFlashError("none fits", "name one with --drafter, or use --method none")
    assert str(wrong) == 'none fits; name one with drafter=, or use method="none"'
    assert wrong.told(option_name).endswith("name one with --drafter, or use --method none")
    fused = DFlashError("it is an adapter", "make a model with mlx_lm.fuse --model owner/name")
    assert str(fused).endswith("mlx_lm.fuse --model owner/name")


def test_no_message_of_the_library_names_an_option_that_python_does_not_know():
    root, found = Path(dflash_mlx.__file__).parent, set()
    for room in ("core", "drafters", "engine", "models", "session", "system", "verifier"):
        for file in (root / room).rglob("*.py"):
            nodes = [each for each in ast.walk(ast.parse(file.read_text()))]
            docs = {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
            texts = [n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            for text in (each.value for each in texts if id(each) not in docs):
                found |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    # of pip, mlx_lm.fuse, dflash_mlx.convert and .train.adapt; and a help text
    others = {"--no-deps", "--no-input", "--only-binary", "--disable-pip-version-check", "--dest"}
    others |= {"--adapter-path", "--save-path", "--mtp", "--block-size", "--undo"}
    said = {option for option in found if "--" not in str(DFlashError(option, ""))}
    assert found - said <= others and "--drafter" in said


SNIPPETS = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_types_are_seen_from_outside_of_the_checkout(tmp_path):
    """What the pages print passes strict checking, by the packages of the environment alone."""
    root = Path(dflash_mlx.__file__).parents[1]
    pages = [root / "README.md", *(root / "docs" / f"{p}.md" for p in ("python", "structured"))]
    codes = [code for page in pages for code in SNIPPETS.findall(page.read_text(encoding="utf-8"))]
    for i, code in enumerate(codes):
        (tmp_path / f"snippet_{i}.py").write_text(code, encoding="utf-8")
    wrong = "from dflash_mlx import load\nload(model=5)\n"
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    files = sorted(file.name for file in tmp_path.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert len(codes) >= 5 and "in 1 file" in done.stdout, done
    assert 'wrong.py:2: error: Argument "model" to "load" has incompatible type' in done.stdout
