"""A command and its terminal: Ctrl+C, closed streams, and text that a terminal would obey.

An interrupt that falls into an import ends in a traceback, or is swallowed by the package that was
being imported. So Ctrl+C ends a command of ours at once until its work begins, and once it is done.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys

INTERRUPTED = 130  # exit code
_SCRIPTS = ("dflash-chat", "dflash-serve")
# Control characters of C0 and C1 but for tab and line feed, DEL, and what turns the direction in
# which text is read.
_OBEYED = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[{_OBEYED}]")
_UNSAFE_BESIDE_BARS = re.compile(rf"(?!\r|\x1b\[A)[{_OBEYED}]")


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


def for_terminal(text: str) -> str:
    """`text` without what a terminal would obey; the letters behind an escape stay, as letters.

    Each character is judged alone, so the pieces of a stream are as safe as the whole.
    """
    return _UNSAFE.sub("", text)


class _SafeStream(io.TextIOWrapper):
    """Another way into a terminal's stream, for text without what `unsafe` finds."""

    def __init__(self, stream: io.TextIOWrapper, unsafe: re.Pattern[str]) -> None:
        super().__init__(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
        self._unsafe = unsafe

    def write(self, text: str, /) -> int:
        super().write(self._unsafe.sub("", text))
        return len(text)


def guard_terminal() -> None:
    """Let nothing that this program prints make a terminal do more than show it.

    Output that is piped or redirected stays as it is. Progress bars on stderr may go to the
    beginning of their line, and a line up.
    """
    for name, unsafe in (("stdout", _UNSAFE), ("stderr", _UNSAFE_BESIDE_BARS)):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream.isatty():
            setattr(sys, name, _SafeStream(stream, unsafe))
