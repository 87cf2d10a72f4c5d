"""What Python runs first in every process of a peer: it loads the BLAS that ours has.

Nothing of ours is imported but `dflash_mlx/system/blas.py`, by its path: one peer has our name.
"""

import importlib.util
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[3] / "dflash_mlx" / "system" / "blas.py"


def load_blas() -> None:
    spec = importlib.util.spec_from_file_location("_peers_blas", FILE)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.preload()


if importlib.util.find_spec("mlx") is not None:
    load_blas()
