"""`python -m dflash_mlx.serve`: the server."""

from dflash_mlx.cli import options
from dflash_mlx.serve.command import PROGRAM, main

if __name__ == "__main__":
    options.run(main, PROGRAM, options.end_program, options.RankMode.FOLLOW)
