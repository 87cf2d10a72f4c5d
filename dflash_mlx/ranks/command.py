"""A command on several ranks, as `mlx.launch` starts and supervises them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from dflash_mlx.core.errors import in_one_line
from dflash_mlx.ranks import RankMode, check_alone, end_if_lost
from dflash_mlx.ranks.group import Ranks, RanksDiffer, join
from dflash_mlx.ranks.loading import SplitTarget, follow
from dflash_mlx.system.machine import describe_versions

_PACKAGES = ("dflash-chat", "mlx", "mlx-lm")  # whose versions have to be the same


def take_part(
    main: Callable[..., None], program: str, mode: RankMode
) -> Callable[[Sequence[str]], None]:
    """`main` as one of several ranks does it.

    It is also given the ranks where all do the same, or else what reads a split target.
    """

    def work(argv: Sequence[str]) -> None:
        ranks = join()
        if ranks.rank:
            _be_silent()
        if mode is RankMode.ALONE:
            check_alone(program)
        try:
            _work(ranks, main, argv, mode)
        except RanksDiffer:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                end_if_lost(error)
            _tell_failure(ranks, error, mode)
            raise

    return work


def _work(ranks: Ranks, main: Callable[..., None], argv: Sequence[str], mode: RankMode) -> None:
    versions = describe_versions()
    ranks.check_alike({package: versions.get(package) for package in _PACKAGES})
    if mode is RankMode.ALL:
        main(argv, ranks)
    elif ranks.rank:
        follow(ranks)
    else:
        main(argv, SplitTarget(ranks))
        ranks.end()


def _be_silent() -> None:
    """The first rank speaks for all, and ends the others when it is interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good


def _tell_failure(ranks: Ranks, error: BaseException, mode: RankMode) -> None:
    """Let the others know: by an order where they wait for one, by a sentence where they do not."""
    if ranks.rank:
        if isinstance(error, Exception):
            what = f"rank {ranks.rank} of {ranks.size} failed: {in_one_line(error)}"
            print(what, file=sys.__stderr__, flush=True)
    elif mode is RankMode.FOLLOW:
        ranks.end()
