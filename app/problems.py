"""What went wrong, in a sentence with the next step."""

from __future__ import annotations

from dflash_mlx import DFlashError
from dflash_mlx.cli.options import in_short, keep_traceback

_FULL = ("unable to allocate", "out of memory", "insufficient memory", "malloc")


def describe(error: Exception) -> str:
    """The sentence; a fault of ours also leaves its traceback in a file."""
    if isinstance(error, DFlashError):
        return str(error)
    reason = in_short(error)
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _FULL):
        return (
            f"there is not enough memory ({reason}); close other programs, begin a /new "
            "conversation, or choose a smaller or a quantised /model"
        )
    log = keep_traceback(error)
    return f"something went wrong ({reason}); try again, and report it with {log} if it stays"
