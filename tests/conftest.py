"""Loads the fast BLAS before any test imports MLX; fixtures the whole suite shares."""

import pytest

from dflash_mlx import blas

blas.preload()

import mlx.nn as nn  # noqa: E402

from families import make_model  # noqa: E402


@pytest.fixture
def tiny_llama() -> nn.Module:
    """A three-layer random llama (64 wide, 97 tokens), fresh for every test that asks."""
    return make_model("llama")
