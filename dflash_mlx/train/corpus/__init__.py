"""Training data for drafters: the target's own answers; `python -m dflash_mlx.corpus` makes it."""
