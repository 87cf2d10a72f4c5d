"""Loads the fast BLAS before any test imports MLX, and keeps clocks out of what tests find."""

from hypothesis import settings

from dflash_mlx import blas

blas.preload()
settings.register_profile("suite", deadline=None)  # processes side by side may have to wait
settings.load_profile("suite")
