"""Keeps the terminal clean: what is printed beside the screen, what texts bring along, its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.color import Color
from textual.content import Content
from textual.drivers import linux_driver
from textual.filter import LineFilter
from textual.message import Message

from dflash_chat.themes import THEMES
from dflash_mlx.client import for_terminal

Read = Callable[[str], None]
STDERR = 2
_PAUSE = 0.5  # seconds between looks at whether the terminal is there
_PATIENCE = 3.0  # seconds that leaving may take when it is gone
_BACKGROUND = re.compile(
    r"\x1b\]11;rgba?:([0-9a-f]+)/([0-9a-f]+)/([0-9a-f]+)[^\x07\x1b]*(?:\x07|\x1b\\)", re.IGNORECASE
)
_BEGUN = re.compile(r"\x1b\]11(;[\w:/]*\x1b?)?\Z")


class Harmless(LineFilter):
    """The one door that all lines of all widgets go through: nothing in them commands a terminal.

    Where a line was laid out, what is taken out of it leaves a gap as wide as it was thought to be.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The segments, without what `for_terminal` leaves out, and without tabs and breaks."""
        return [*map(_harmless, segments)]


def _harmless(segment: Segment) -> Segment:
    text = segment.text
    if segment.control or text.isprintable():
        return segment
    safe = for_terminal(text).replace("\n", "").replace("\t", "")
    return Segment(safe + " " * (cell_len(text) - cell_len(safe)), segment.style)


def when_hung_up(leave: Callable[[], object]) -> None:
    """Call `leave` on the running loop when the terminal is closed; soon after, the program ends.

    Whatever happens: without a terminal, what Textual writes waits for ever, its input thread works
    without a pause, and nobody can tell the program to stop. The terminal itself is asked, since a
    signal is not heard while the main thread waits for a lock.
    """
    loop, terminal = asyncio.get_running_loop(), 0
    if not os.isatty(terminal):
        return

    def watch() -> None:
        with suppress(termios.error):
            while True:
                termios.tcgetattr(terminal)
                time.sleep(_PAUSE)
        with suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(leave)
        time.sleep(_PATIENCE)
        os._exit(128 + signal.SIGHUP)

    threading.Thread(target=watch, name="terminal", daemon=True).start()


def assembled(parts: Iterable[tuple[str, str]]) -> Content:
    """Texts and their styles, side by side.

    Textual leaves control characters out when it has counted them: styles would lie behind the end.
    """
    return Content.assemble(*((for_terminal(text), style) for text, style in parts))


@contextmanager
def caught_stderr(read: Read) -> Iterator[None]:
    """Send file descriptor 2 to `read`, called on another thread, while Textual keeps the terminal.

    pip draws its progress bar only on a terminal, so what is put in place of the descriptor is one.
    Textual writes to `sys.__stderr__`, which goes on meaning the real terminal.
    """
    main, side = os.openpty()
    real = os.dup(STDERR)
    screen = open(real, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    before, sys.__stderr__ = sys.__stderr__, screen  # type: ignore[misc]
    os.dup2(side, STDERR)
    os.close(side)
    thread = threading.Thread(target=_pump, args=(main, read), name="stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError):  # the terminal is gone
            screen.flush()
        os.dup2(real, STDERR)  # the last end of the pair, so the thread meets the end of file
        sys.__stderr__ = before  # type: ignore[misc]
        thread.join(1.0)
        os.close(real)


def _pump(main: int, read: Read) -> None:
    while True:
        try:
            data = os.read(main, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            data = b""
        if not data:
            os.close(main)
            return
        read(data.decode("utf-8", errors="replace"))


class _Listening(XTermParser):
    """Takes what the terminal says of its background out of what is typed, however late it is.

    ask: sends the question, once keys are no longer echoed. hear: whether it is light.
    """

    def __init__(self, ask: Read, hear: Callable[[bool], object], debug: bool) -> None:
        super().__init__(debug)
        self._hear, self._begun = hear, ""
        ask("\x1b]11;?\x1b\\")

    def feed(self, data: str) -> Iterable[Message]:
        """What was typed as messages; an answer that has only begun waits for its other half."""
        text = self._begun + data
        for said in _BACKGROUND.finditer(text):
            red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in said.groups())
            self._hear(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5)
        text = _BACKGROUND.sub("", text)
        self._begun = "".join(part[0] for part in _BEGUN.finditer(text) if data)
        text = text.removesuffix(self._begun)
        return super().feed(text) if text or not data else ()


def follow_background(app: App[Any], told: str) -> None:
    """Light or dark as the terminal is, until the user chooses. told: COLORFGBG, which some set.

    Textual takes an answer for keys, so its parser is replaced by one that knows it.
    """
    ours = app.theme

    def hear(light: bool) -> None:
        nonlocal ours
        if app.theme == ours:
            app.theme = ours = THEMES["light" if light else "dark"].name

    def ask(text: str) -> None:
        if app._driver is not None:
            app._driver.write(text)

    hear(told.rpartition(";")[2] in ("7", "15"))
    parser = partial(_Listening, ask, lambda light: app.call_later(hear, light))
    linux_driver.XTermParser = parser  # type: ignore[attr-defined,assignment]
