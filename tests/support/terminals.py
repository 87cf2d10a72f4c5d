"""A pseudo-terminal in which the whole program runs."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[2]
START = "import dflash_chat.main as m; m.main()"


class Terminal:
    """A terminal of `columns` x `lines` in which dflash-chat runs with `arguments`.

    cache: a folder in place of the user's cache, so that no timing of a test run stays there.
    program: Python that starts the chat.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cache: Path,
        columns: int = 100,
        lines: int = 30,
        program: str = START,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.raw = b""  # all that the program wrote
        self._stream = pyte.ByteStream(self.screen)
        self._main, side = pty.openpty()
        self._set_size(columns, lines)
        environment = {**os.environ, "TERM": "xterm-256color", "XDG_CACHE_HOME": str(cache)}
        for name in ("COLUMNS", "LINES"):  # pytest-xdist's processes have them; they hide the size
            environment.pop(name, None)
        environment["XDG_CONFIG_HOME"] = str(cache / "config")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # its end ends the program
            env=environment,
        )
        os.close(side)

    def __enter__(self) -> Terminal:
        """Wait for the head line, or the end; before, the terminal is not set up for keys."""
        try:
            self.until(lambda screen: "dflash-chat" in screen or self.process.poll() is not None)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        os.close(self._main)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """As when the user drags the window's corner."""
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)
        self.process.send_signal(signal.SIGWINCH)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """As when the user closes the window."""
        os.close(self._main)
        self._main = os.open(os.devnull, os.O_RDWR)

    @property
    def text(self) -> str:
        """What is on screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def background(self) -> int:
        """How much red there is behind the middle of the screen, of 255."""
        return int(self.screen.buffer[self.screen.lines // 2][self.screen.columns // 2].bg[:2], 16)

    def type(self, keys: str) -> None:
        """Press keys; reads meanwhile, because a full terminal would stop the program."""
        data = keys.encode()
        while data:
            self._read(0.0)
            data = data[os.write(self._main, data[:512]) :]

    def until(self, condition: Callable[[str], object], most: float = 60.0) -> str:
        """Read until the screen fulfils `condition`; returns the screen."""
        end = time.monotonic() + most
        while not condition(self.text):
            assert time.monotonic() < end, f"the app did not get there:\n{self.text}"
            ended = self.process.poll() is not None and not self._read(0.0)
            assert not ended, f"it ended:\n{self.text}"
            self._read(0.1)
        return self.text

    def wait(self, most: float = 30.0) -> int:
        """Read until the program ends; its exit code."""
        end = time.monotonic() + most
        while self.process.poll() is None:
            assert time.monotonic() < end, f"the app does not end:\n{self.text}"
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        """Take in what the program wrote, waiting so long for it."""
        if not select.select([self._main], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._main, 1 << 16)
        except OSError:  # how Linux says that the program has left
            return False
        self._stream.feed(data)
        self.raw += data
        return bool(data)
