"""Metal kernels, each beside a pure-MLX reference: arrays in, arrays out.

No kernel yet. This package knows nothing of decoding and imports nothing from `dflash_mlx`.
"""
