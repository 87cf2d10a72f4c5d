"""What the command lines say of their options, and what the README says of all."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_chat import main as chat
from dflash_mlx import corpus, doctor
from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.cli import generate
from dflash_mlx.cli import options as cli
from dflash_mlx.convert import __main__ as convert
from dflash_mlx.core.option import option
from dflash_mlx.models.downloads import stored_bytes, weights_of
from dflash_mlx.models.names import registered
from dflash_mlx.serve import command as serve
from dflash_mlx.train import __main__ as train

README = Path(__file__).parents[2] / "README.md"
ANSWERING = (generate.parser, benchmark.parser, chat._parser)
OTHERS = (doctor.parser, serve.parser, convert.parser, train.parser, corpus.parser)
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


def test_a_percent_sign_in_a_help_text_is_only_that():
    @dataclass(frozen=True)
    class Settings:
        share: int = option(90, "what is 90 % sure, or %(dest)s", type=int)

    parser = cli.Parser(prog="program")
    cli.add_options(parser, Settings)
    assert "what is 90 % sure, or %(dest)s (default: 90)" in " ".join(parser.format_help().split())


# The README


def test_the_table_of_targets_has_the_registry_s_drafters_and_sizes():
    lines = README.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ GB", line)]
    assert len(rows) > 20
    for _, targets, four, eight, drafters in rows[1:]:  # behind the built-in pair
        known = [registered(target) for target in targets.split(", ")]
        assert None not in known, targets
        for size, bits in ((four, 4), (eight, 8)):
            computed = stored_bytes(weights_of(known[0].name, known[0].billions), bits) / 1e9
            assert float(size.removesuffix(" GB")) == pytest.approx(computed, rel=0.04), targets
        for shown in re.findall(r"`([^`]+)`", drafters):
            assert any(entry.drafter.endswith(shown.lstrip(".")) for entry in known), shown
    needs = [float(row[2].removesuffix(" GB")) for row in rows]
    room = [float(row[0].split()[0]) for row in rows]
    assert room == sorted(room) and all(n < 2 / 3 * r for n, r in zip(needs, room, strict=True))


@pytest.mark.real
def test_the_examples_in_the_readme_run_and_print_their_answers(capsys):
    codes = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(codes) == 3
    for code in codes:
        exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "sky" in printed
    assert re.search(r"\d\.\d\d tokens per round", printed)
    assert re.search(r"\d+ tokens in the caches", printed)
    assert "Name a river." in printed


@pytest.mark.parametrize("pattern", [r"--prompts (\S+)", r"\]\((?!https?:)([^)]+)\)"])
def test_every_file_that_its_commands_read_or_its_links_name_exists(pattern):
    files = re.findall(pattern, README.read_text(encoding="utf-8"))
    assert files
    assert [file for file in files if not (README.parent / file).exists()] == []
