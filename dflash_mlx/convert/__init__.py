"""Converting published checkpoints to MLX folders; `python -m dflash_mlx.convert` runs it.

`plan` finds what is to be converted, tells what that needs and fills a folder that is complete or
absent; `conversion` makes one model.
"""
