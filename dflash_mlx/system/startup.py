"""How a command begins and ends: closed descriptors, and Ctrl+C at any moment.

An interrupt that falls into an import ends in a traceback, or is swallowed by the package that was
being imported. So while a command of ours starts, and once it is done, Ctrl+C ends the program at
once; in between it is the exception that tidies up. Imports nothing that takes time.

That exception can be lost, too: in a bare `except`, in C code, or in a `__del__`, from where Python
lets none out. So a timer looks what became of it, and raises it again where nothing did.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130  # exit code
_LOOK = 1.0  # seconds from Ctrl+C to the first look at what became of it, and between looks


def begin() -> None:
    """The first thing that a command does; nothing where another program imports this package."""
    if is_command():
        open_closed()
        leave_on_interrupt()


def is_command() -> bool:
    """Whether this program is `python -m dflash_mlx...` or one of our scripts."""
    words = [*sys.orig_argv, "-m", ""]
    at = words.index("-m")
    module = words[at + 1] if all(w[:1] == "-" and w != "-c" for w in words[1:at]) else ""
    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    return script in ("dflash-chat", "dflash-serve") or module.startswith("dflash_mlx.")


def leave_on_interrupt() -> None:
    """From now on Ctrl+C ends a command without a word, because there is nothing to tidy up."""
    if is_command() and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, _leave)
        signal.setitimer(signal.ITIMER_REAL, 0)


def raise_on_interrupt() -> None:
    """From now on Ctrl+C is a KeyboardInterrupt, as in any Python program, but is not lost."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGALRM, _raise_again)
        sys.unraisablehook = _dropped
        signal.signal(signal.SIGINT, _raise)


def is_behind(error: BaseException | None, kind: type[BaseException] = KeyboardInterrupt) -> bool:
    """Whether `error` is an interrupt, or came of one: libraries tell it in other words."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


def _raise(*_: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, _LOOK, _LOOK)
    raise KeyboardInterrupt


def _raise_again(*_: object) -> None:
    """Unless it is just being handled: then this moment is one of tidying up."""
    handled = sys.exc_info()[1]
    if not (is_behind(handled) or is_behind(handled, GeneratorExit)):
        raise KeyboardInterrupt


def _dropped(what: sys.UnraisableHookArgs) -> None:
    """Nobody needs to read of an interrupt that is raised again."""
    if what.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(what)


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
