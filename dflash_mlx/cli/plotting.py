"""Matplotlib, which only drawings need."""

from __future__ import annotations

from typing import Any

from dflash_mlx.core.errors import DFlashError


def import_pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files; DFlashError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise DFlashError(
            "drawing needs matplotlib", "install it: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
