"""`python -m dflash_mlx.generate`: one answer on the command line.

Nothing imports it: `dflash_mlx.generate` is the function of this name.
"""

from dflash_mlx.cli import options
from dflash_mlx.cli.generate import PROGRAM, main

if __name__ == "__main__":
    options.run(main, PROGRAM, options.end_program, options.RankMode.FOLLOW)
