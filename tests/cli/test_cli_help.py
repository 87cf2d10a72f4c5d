"""What the command lines say of their options, and the names that they share."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import dflash_mlx
from dflash_chat import main as chat
from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.cli import options as cli

generate = import_module("dflash_mlx.cli.generate")

PARSERS = {
    "generate": generate.parser,
    "benchmark": benchmark.parser,
    "chat": chat._parser,
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_has_a_help_text_and_every_setting_an_option(name):
    actions = {action.dest: action for action in PARSERS[name]()._actions}
    assert [dest for dest, action in actions.items() if not action.help] == []
    assert ("method" in actions) != ("methods" in actions)
    assert actions.keys() >= {
        "model",
        "drafter",
        "block_size",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
    }


@pytest.mark.parametrize(
    ("main", "name"),
    [(generate.main, "generate"), (benchmark.main, "benchmark"), (chat.run, "chat")],
    ids=["generate", "benchmark", "chat"],
)
def test_help_goes_to_stdout_with_every_option(main, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit) as left:
        cli.run(main, "program")
    out, err = capsys.readouterr()
    assert (int(left.value.code or 0), err) == (0, "")
    options = [option for a in PARSERS[name]()._actions for option in a.option_strings]
    assert len(options) > 15 and [o for o in options if o not in out] == []


def test_the_package_keeps_its_function_when_the_command_line_of_that_name_is_imported():
    assert sys.modules["dflash_mlx.cli.generate"] is generate
    assert callable(dflash_mlx.generate)
