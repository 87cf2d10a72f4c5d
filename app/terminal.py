"""Keeps the screen clean: what programs and C libraries print to stderr is caught."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Read = Callable[[str], None]
STDERR = 2


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
        screen.flush()
        os.dup2(real, STDERR)  # the last end of the pair, so the thread meets the end of file
        sys.__stderr__ = before  # type: ignore[misc]
        thread.join(1.0)
        os.close(real)


def _pump(main: int, read: Read) -> None:
    """Pass on what comes until the other end is closed."""
    while True:
        try:
            data = os.read(main, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            data = b""
        if not data:
            os.close(main)
            return
        read(data.decode("utf-8", errors="replace"))
