"""Loads the fast BLAS before any test imports MLX."""

from dflash_mlx import blas

blas.preload()
