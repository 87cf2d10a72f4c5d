"""Converting published checkpoints to MLX folders; `python -m dflash_mlx.convert` runs it.

`source` finds what is to be converted, `target` and `drafter` make a lazy `Conversion` of it,
`staging` and `tensors` write that tensor by tensor into a folder that is complete or absent.
"""
