"""`python -m dflash_mlx.doctor`: this machine and a pair, checked."""

from dflash_mlx.cli import options
from dflash_mlx.cli.doctor import PROGRAM, main

if __name__ == "__main__":
    options.run(main, PROGRAM)
