"""What the command lines say of their options, and the names that they share."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from dflash_chat import main as chat
from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.cli import generate
from dflash_mlx.cli import options as cli
from dflash_mlx.core.option import option

COMMANDS = {
    "generate": (generate.main, generate.parser),
    "benchmark": (benchmark.main, benchmark.parser),
    "chat": (chat.run, chat._parser),
}
SHARED = {"model", "drafter", "block_size", "max_tokens"}
SHARED |= {"temperature", "top_p", "top_k", "min_p", "seed"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_every_setting_has_one(name, monkeypatch, capsys):
    main, parser = COMMANDS[name]
    actions = {action.dest: action for action in parser()._actions}
    assert [dest for dest, action in actions.items() if not action.help] == []
    assert ("method" in actions) != ("methods" in actions)
    assert actions.keys() >= SHARED
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit) as left:
        cli.run(main, "program")
    out, err = capsys.readouterr()
    assert (int(left.value.code or 0), err) == (0, "")
    assert [o for a in actions.values() for o in a.option_strings if o not in out] == []
    assert "{'" not in out, "a % in a help text was filled in"


def test_a_percent_sign_in_a_help_text_is_only_that():
    @dataclass(frozen=True)
    class Settings:
        share: int = option(90, "what is 90 % sure, or %(dest)s", type=int)

    parser = cli.Parser(prog="program")
    cli.add_options(parser, Settings)
    assert "what is 90 % sure, or %(dest)s (default: 90)" in " ".join(parser.format_help().split())
