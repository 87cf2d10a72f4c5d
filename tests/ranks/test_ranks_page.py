"""The commands that docs/two-machines.md names are taken by the parsers."""

from __future__ import annotations

import re
import shlex

import pytest

from dflash_mlx.cli import disk, generate
from support.ranks import ROOT

PAGE = (ROOT / "docs" / "two-machines.md").read_text(encoding="utf-8").replace("\\\n", " ")


def test_a_model_is_fetched_as_the_page_says(monkeypatch):
    fetched = []
    monkeypatch.setattr(disk, "download", fetched.append)
    (words,) = re.findall("`dflash-chat models (.+?)`", PAGE)
    disk.models(words.split())
    assert [config.model for config in fetched] == ["NAME"]


@pytest.mark.parametrize("line", re.findall(r"dflash_mlx\.generate (--.+)", PAGE))
def test_an_answer_is_asked_for_as_the_page_says(line):
    parsed = generate.parser().parse_args(shlex.split(line))
    assert (parsed.model, parsed.prompt) == ("NAME", "Hello")


def test_every_command_of_the_page_is_there():
    names = set(re.findall(r"dflash_mlx\.(\w+)", PAGE))
    assert names >= {"generate", "benchmark", "serve", "train", "corpus"}
    doors = ("dflash_mlx/{}.py", "dflash_mlx/{}/__main__.py")
    assert all(any((ROOT / door.format(name)).exists() for door in doors) for name in names)
