"""A small language model drafts token by token (arXiv 2211.17192), as a chain or as a tree."""

from dflash_mlx.drafters.autoregressive import step_by_step
from dflash_mlx.drafters.lm.checkpoint import FILES
from dflash_mlx.drafters.lm.model import FAMILY

METHOD = step_by_step(FAMILY, "small language model", FILES)
