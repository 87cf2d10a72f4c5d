"""Keeps the terminal clean: what is printed beside the screen, what texts bring along, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter

from dflash_mlx.client import for_terminal

Read = Callable[[str], None]
STDERR = 2
_PAUSE = 0.5  # seconds between looks at whether the terminal is there
_PATIENCE = 3.0  # seconds that leaving may take when it is gone


class Harmless(LineFilter):
    """The one door that all lines of all widgets go through: nothing in them commands a terminal.

    Where a line was laid out, what is taken out of it leaves a gap as wide as it was thought to be.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The segments, without what `for_terminal` leaves out, and without tabs and breaks."""
        return [segment if _is_harmless(segment) else _harmless(segment) for segment in segments]


def _is_harmless(segment: Segment) -> bool:
    return bool(segment.control) or segment.text.isprintable()


def _harmless(segment: Segment) -> Segment:
    text = segment.text
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
