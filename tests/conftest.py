"""Loads the fast BLAS before any test imports MLX, and keeps clocks out of what tests find."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from dflash_mlx.system import blas

blas.preload()
settings.register_profile("suite", deadline=None)  # processes side by side may have to wait
settings.load_profile("suite")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random target, for command lines that train."""
    from support.tiny_training import write_target  # imports MLX

    return write_target(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Any:
    """A `Place` for one run with that target."""
    from support.tiny_training import Place

    return Place(tmp_path, tiny_model)
