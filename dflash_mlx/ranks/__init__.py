"""Several processes that `mlx.launch` started together; light, because every command asks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path

from dflash_mlx.core.errors import DFlashError, in_one_line

_LAUNCHED = "MLX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"  # by MLX's launcher, by those of MPI
_BACKENDS = "[ring]", "[jaccl]", "[mpi]", "[nccl]"  # begin what MLX says of a lost connection


class RankMode(Enum):
    """What several ranks do with a command."""

    ALONE = "it takes one process"
    FOLLOW = "the first does it, the others compute their parts of its target's passes"


class RanksLost(RuntimeError):
    """The ranks cannot go on together."""


def launched() -> bool:
    """Whether a launcher started this process as one of several.

    MLX is not asked before: by itself it would look for MPI, and on some machines start it.
    """
    hosts = os.environ.get("MLX_HOSTFILE")
    if hosts and Path(hosts).is_file() and not Path(hosts).read_text("utf-8").strip():
        return False  # as mlx.launch makes it for one process, and MLX cannot read
    return any(name in os.environ for name in _LAUNCHED)


def check_alone(what: str) -> None:
    """DFlashError for something that several ranks cannot do."""
    if launched():
        step = "start it by itself, without mlx.launch"
        raise DFlashError(f"{what} takes one process, and this is one of several ranks", step)


def is_lost(error: BaseException | None) -> bool:
    """Whether `error` came of another rank's end."""
    while error is not None:
        if isinstance(error, RanksLost) or str(error).startswith(_BACKENDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_if_lost(error: Exception) -> None:
    """End this rank at once where `error` came of another's end; no other thread is waited for."""
    if is_lost(error):
        with suppress(OSError, ValueError):
            what = (
                f"another rank has ended, or the ranks have lost each other: {in_one_line(error)}"
            )
            print(f"{what}; this rank ends, too", file=sys.__stderr__, flush=True)
        os._exit(1)
