"""`python -m dflash_mlx.generate`: one answer on the command line."""

import sys

import dflash_mlx
from dflash_mlx.cli import options
from dflash_mlx.cli.generate import PROGRAM, main

if __name__ == "__main__":
    options.run(main, PROGRAM, mode=options.RankMode.FOLLOW)
else:  # the module would take the place of the function that the package offers by this name
    sys.modules[__name__] = dflash_mlx.generate  # type: ignore[assignment]
