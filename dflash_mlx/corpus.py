"""`python -m dflash_mlx.corpus`: a target's own answers, as training data."""

from dflash_mlx.cli import options
from dflash_mlx.train.corpus.collect import PROGRAM, main

if __name__ == "__main__":
    options.run(main, PROGRAM, mode=options.RankMode.ALL)
