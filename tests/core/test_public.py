"""What `import dflash_mlx` offers, and what it leaves alone until it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_mlx
from dflash_mlx import DecodeConfig, DFlashError
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
