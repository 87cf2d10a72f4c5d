"""Commands in several processes that were started together, as `mlx.launch` starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from enum import Enum
from functools import cache
from pathlib import Path

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.ranks import check_same, follow
from dflash_mlx.system.ranks import BAD_INPUT, SILENCE, Ranks, meet, started_together

HOSTS, COORDINATOR = "MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"  # as MLX's launcher sets them
LIMIT = "DFLASH_SILENCE"  # seconds without a sign of life after which a rank counts as gone
_LONGEST = 3600.0


class Together(Enum):
    """What several ranks do with a command."""

    NO = "it takes one process"
    FOLLOW = "the first does it, the others compute their parts of its target's passes"
    ALL = "all do the same, each on its part of the data"


@cache  # a process belongs to one group, as in MLX itself
def joined() -> Ranks | None:
    """The processes that this one was started with; None where it is alone.

    Ends the program with a sentence where the others cannot be reached.
    """
    if not started_together():
        return None
    hosts = os.environ.get(HOSTS)
    try:
        if hosts and not Path(hosts).read_text(encoding="utf-8").strip():
            return None  # as mlx.launch makes it for one process, and MLX cannot read
        return meet(_first_host, sys.argv[1:], _silence())
    except DFlashError as error:
        print(error, file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except (OSError, RuntimeError, ValueError) as error:
        step = "see whether all of them were started, and their addresses"
        print(f"the other ranks cannot be reached ({error}); {step}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None


def take_part(together: Together) -> Ranks | None:
    """Meet the other ranks, if there are any; unless all do the same, a follower stays here.

    It is silent then, and ends when the first rank does.
    """
    ranks = joined()
    if ranks is not None and ranks.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever leads ends the others
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
        if together is Together.FOLLOW:
            follow(ranks)
        if together is Together.NO:
            ranks.end()
    return ranks


def check_part(ranks: Ranks, together: Together, program: str) -> None:
    """DFlashError for a command of one process; one for all is ended where ranks differ."""
    if together is Together.NO:
        check_alone(program)
    if together is Together.ALL:
        check_same(ranks)


def check_alone(what: str) -> None:
    """DFlashError for something that several ranks cannot do."""
    if (ranks := joined()) is not None:
        step = "start it by itself, without mlx.launch"
        raise DFlashError(f"{what} takes one process, and these are {ranks.size} ranks", step)


def _silence() -> float:
    """As the first rank's environment has it; those of others do not count."""
    if os.environ.get("MLX_RANK", "0") != "0":
        return SILENCE
    text = os.environ.get(LIMIT, str(SILENCE))
    try:
        if 1 <= (seconds := float(text)) <= _LONGEST:
            return seconds
    except ValueError:
        pass
    raise DFlashError(f"{LIMIT} is {text!r}", f"give it 1 to {_LONGEST:g} seconds")


def _first_host() -> str:
    """The first rank's address, as the others know it; only the first one needs it."""
    file, coordinator = os.environ.get(HOSTS), os.environ.get(COORDINATOR)
    if file:
        first = json.loads(Path(file).read_text(encoding="utf-8"))[0]
        return str(first if isinstance(first, str) else first[0]).rpartition(":")[0]
    return coordinator.rpartition(":")[0] if coordinator else socket.gethostname()
