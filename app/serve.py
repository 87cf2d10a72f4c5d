"""`dflash-serve`: the server of dflash_mlx, and with --watch a view of it on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_mlx.cli import options as cli
from dflash_mlx.serve.command import PROGRAM
from dflash_mlx.serve.command import main as serve

WATCH = "--watch"


def main() -> None:
    """The console script."""
    cli.run(run, PROGRAM, cli.end_program, cli.RankMode.FOLLOW)


def run(argv: Sequence[str], reader: cli.TargetReader = cli.WHOLE) -> None:
    """Serve; with --watch in a process of its own, beside the view."""
    if WATCH in argv:
        cli.check_alone(WATCH)
        from dflash_chat.watch import watch

        watch([word for word in argv if word != WATCH])
    else:
        serve(argv, reader)
