"""The commands that docs/two-machines.md names are taken by the parsers."""

from __future__ import annotations

import re
import shlex
from importlib import import_module

import pytest

from dflash_mlx.cli import disk
from support.ranks import ROOT

PAGE = (ROOT / "docs" / "two-machines.md").read_text(encoding="utf-8").replace("\\\n", " ")
MODULES = {"generate": "cli.generate", "corpus": "train.corpus.collect", "serve": "serve.command"}


def test_a_model_is_fetched_as_the_page_says(monkeypatch):
    fetched = []
    monkeypatch.setattr(disk, "download", fetched.append)
    (words,) = re.findall("`dflash-chat models (.+?)`", PAGE)
    disk.models(words.split())
    assert [config.model for config in fetched] == ["NAME"]


@pytest.mark.parametrize("line", re.findall(r"python -m dflash_mlx\.(\w+ --.+)", PAGE))
def test_a_command_is_taken_as_the_page_has_it(line):
    module, *words = shlex.split(line)
    parsed = import_module(f"dflash_mlx.{MODULES[module]}").parser().parse_args(words)
    assert parsed.model == "NAME"


def test_every_command_of_the_page_is_there():
    names = set(re.findall(r"dflash_mlx\.(\w+)", PAGE))
    assert names >= {"generate", "benchmark", "serve", "train", "corpus"}
    for name in names:
        import_module(
            f"dflash_mlx.{name}" + ".__main__" * (name in ("benchmark", "serve", "train"))
        )
