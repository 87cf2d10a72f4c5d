"""Converting published checkpoints to MLX folders; `python -m dflash_mlx.convert` runs it."""
