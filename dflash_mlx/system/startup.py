"""How a command begins and ends: closed descriptors, and Ctrl+C while nothing is to be tidied up.

An interrupt that falls into an import ends in a traceback, or is swallowed by the package that was
being imported. So Ctrl+C ends a command of ours at once until its work begins, and once it is done.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130  # exit code
_SCRIPTS = ("dflash-chat", "dflash-serve")


def begin() -> None:
    """The first thing that a command does; nothing where another program imports this package."""
    if is_command():
        open_closed()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            leave_on_interrupt()


def is_command() -> bool:
    """Whether one of our scripts begins, or `python -m dflash_mlx...`, before its file is known."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    ours = any(word.startswith("dflash_mlx.") for word in sys.orig_argv)
    return program in _SCRIPTS or (program == "-m" and ours)


def leave_on_interrupt() -> None:
    """From now on Ctrl+C ends the program without a word, by the signal itself."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_interrupt() -> bool:
    """From now on Ctrl+C is a KeyboardInterrupt again; False where it was nothing else before."""
    left = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if left:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return left


def is_behind(error: BaseException | None) -> bool:
    """Whether `error` came of an interrupt: libraries tell it in other words."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def open_closed() -> None:
    """Open the null device for standard streams that were closed, as in `program <&-`.

    Else the next file that is opened gets the number 0, 1 or 2, which libraries take for something
    else, and `sys.stdin` and its like are None.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, so this one's
            os.set_inheritable(null, True)
            stream = open(null, mode, encoding="utf-8")  # noqa: SIM115 - for the whole program
            setattr(sys, name, stream)
