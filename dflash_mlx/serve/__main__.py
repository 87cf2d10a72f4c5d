"""`dflash-serve`, and `python -m dflash_mlx.serve`: the server."""

from dflash_mlx.cli import options
from dflash_mlx.serve.command import PROGRAM, main


def start() -> None:
    """The console script."""
    options.run(main, PROGRAM, options.end_program, options.RankMode.FOLLOW)


if __name__ == "__main__":
    start()
