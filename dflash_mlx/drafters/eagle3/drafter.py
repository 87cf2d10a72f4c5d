"""EAGLE-3 (arXiv 2503.01840): drafts token by token, as a chain or as EAGLE-2's tree."""

from dflash_mlx.drafters.autoregressive import step_by_step
from dflash_mlx.drafters.eagle3.checkpoint import FILES
from dflash_mlx.drafters.eagle3.model import FAMILY

METHOD = step_by_step(FAMILY, "EAGLE-3", FILES)
