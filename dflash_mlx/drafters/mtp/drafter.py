"""Multi-token prediction: the head that a target was trained with drafts token by token."""

from dflash_mlx.drafters.autoregressive import step_by_step
from dflash_mlx.drafters.mtp.checkpoint import FILES
from dflash_mlx.drafters.mtp.model import FAMILY

METHOD = step_by_step(FAMILY, "multi-token prediction", FILES)
