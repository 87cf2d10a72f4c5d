"""Nothing that is printed commands a terminal, and what is piped stays as it is."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pyte
import pytest

from dflash_mlx.system import terminal
from dflash_mlx.system.terminal import for_terminal
from support.hostile import Watched, commands_in, hostile_text, pieces, state

ROOT = Path(__file__).parents[2]


def test_letters_stay_and_control_characters_go():
    hostile = "before\x1b[2J\x1b]0;owned\x07\x9b31m\u202eafter\r\n\tend"
    assert for_terminal(hostile) == "before[2J]0;owned31mafter\n\tend"
    kept = "naïve 漢字 \U0001f468\u200d\U0001f469 \xa0\u2028 ~!\n\t"
    assert for_terminal(kept) == kept


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_no_text_changes_the_state_of_a_terminal_however_it_is_cut(first):
    screen = Watched()
    stream, before = pyte.Stream(screen), state(screen)
    for seed in range(first, first + 100):
        shown = "".join(map(for_terminal, pieces(hostile_text(seed), seed)))
        assert shown == for_terminal(hostile_text(seed))
        stream.feed(shown.replace("\n", "\r\n"))
        assert state(screen) == before, hostile_text(seed)


class Tty(io.BytesIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_streams_to_a_terminal_are_guarded_and_others_left_alone(monkeypatch, name):
    raw = Tty()
    stream = io.TextIOWrapper(raw, "utf-8")
    monkeypatch.setattr(sys, name, stream)
    terminal.guard_terminal()
    terminal.guard_terminal()  # twice is as once
    guarded = getattr(sys, name)
    for seed in range(200):
        for piece in pieces(hostile_text(seed), seed):
            print(piece, end="", file=guarded)
    guarded.write("\r 50%|x\x1b[A")
    guarded.flush()
    written = raw.getvalue().decode()
    bars, end = {"stdout": ("", " 50%|x[A"), "stderr": ("\r", "\r 50%|x\x1b[A")}[name]
    assert written.endswith(end)
    rest = written.replace("\x1b[A", "") if bars else written
    assert set(commands_in(rest)) <= set(bars)
    piped = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, name, piped)
    terminal.guard_terminal()
    assert getattr(sys, name) is piped


PROGRAM = """
import sys
from dflash_mlx import DFlashError
from dflash_mlx.cli import options as cli
from support.hostile import hostile_text

def main(argv):
    for seed in range(100):
        print(hostile_text(seed))
        print(hostile_text(-seed), file=sys.stderr)
    raise DFlashError(hostile_text("x") + chr(27) + "[2J" + chr(13), "do something else")

cli.run(main, "program")
"""


def test_a_command_on_a_terminal_leaves_it_as_it_was_and_says_the_same_into_a_pipe():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", PROGRAM]
    main, side = pty.openpty()
    process = subprocess.Popen(command, stdout=side, stderr=side, env=environment)
    os.close(side)
    written = b""
    while data := _read(main):
        written += data
    os.close(main)
    assert process.wait() == 2
    screen = Watched()
    before = state(screen)
    pyte.ByteStream(screen).feed(written)
    assert state(screen) == before
    piped = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (piped.returncode, b"\x1b[2J" in piped.stdout) == (2, True)
    assert piped.stdout.decode() == "".join(hostile_text(seed) + "\n" for seed in range(100))


def _read(main: int) -> bytes:
    try:
        return os.read(main, 1 << 16)
    except OSError:  # how Linux says that the other end is closed
        return b""
