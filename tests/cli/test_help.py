"""What the command lines say of their options."""

from __future__ import annotations

import argparse
import re
import runpy
from dataclasses import dataclass

import pytest

from dflash_chat import main as chat
from dflash_mlx import corpus, doctor
from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.cli import generate
from dflash_mlx.cli import options as cli
from dflash_mlx.convert import __main__ as convert
from dflash_mlx.core.option import option
from dflash_mlx.serve import command as serve
from dflash_mlx.train import __main__ as train

ANSWERING = (generate.parser, benchmark.parser, chat._parser)
OTHERS = (doctor.parser, serve.parser, convert.parser, train.parser, corpus.parser)
SERVER = {serve.PROGRAM}
SHARED = {"model", "drafter", "block_size", "max_tokens"}
SHARED |= {"temperature", "top_p", "top_k", "min_p", "seed"}


@pytest.mark.parametrize("make", [*ANSWERING, *OTHERS])
def test_help_has_every_option_and_every_setting_has_one(make):
    parser = make()
    actions = {action.dest: action for action in parser._actions}
    assert [dest for dest, action in actions.items() if not action.help] == []
    if make in ANSWERING:
        assert ("method" in actions) != ("methods" in actions)
        assert actions.keys() >= SHARED
    text = parser.format_help()
    shown = [action for action in actions.values() if action.help != argparse.SUPPRESS]
    assert [o for action in shown for o in action.option_strings if o not in text] == []
    assert "{'" not in text, "a % in a help text was filled in"


@pytest.mark.parametrize(("option", "kind"), [("--temperature", "a"), ("--max-tokens", "a whole")])
def test_a_word_in_place_of_a_number_is_told_without_words_of_python(option, kind, capsys):
    with pytest.raises(SystemExit) as refused:
        generate.parser().parse_args([option, "abc"])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and f": {option} is 'abc', not {kind} number;" in said


def test_a_word_that_is_no_choice_is_told_with_those_that_are(capsys):
    with pytest.raises(SystemExit) as refused:
        generate.parser().parse_args(["--kernels", "maybe"])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and "--kernels is 'maybe'; choose one of auto, off, on;" in said


def test_the_package_says_which_commands_there_are(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dflash_mlx", "generate"])
    with pytest.raises(SystemExit) as refused:
        runpy.run_module("dflash_mlx", run_name="__main__")
    assert refused.value.code == 2 and "no generate here" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["dflash_mlx"])
    runpy.run_module("dflash_mlx", run_name="__main__")
    listed = re.findall(r"^(?:python -m )?(dflash\S+)", capsys.readouterr().out, re.MULTILINE)
    modules = {name for name in listed if name.startswith("dflash_mlx.")}
    assert modules == {make().prog for make in (*ANSWERING, *OTHERS)} - {"dflash-chat", *SERVER}
    assert {"dflash-chat", "dflash-serve"} <= {*listed}


def test_a_percent_sign_in_a_help_text_is_only_that():
    @dataclass(frozen=True)
    class Settings:
        share: int = option(90, "what is 90 % sure, or %(dest)s", type=int)

    parser = cli.Parser(prog="program")
    cli.add_options(parser, Settings)
    assert "what is 90 % sure, or %(dest)s (default: 90)" in " ".join(parser.format_help().split())
