"""Converting published checkpoints to MLX folders; `python -m dflash_mlx.convert` runs it.

`source` finds what is to be converted, `conversion` makes lazy weights of it, `plan` tells what
that needs and does it, `writing` fills a folder that is complete or absent.
"""
