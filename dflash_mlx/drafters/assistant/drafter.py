"""Gemma 4's assistants draft token by token, as a chain or as EAGLE-2's tree."""

from dflash_mlx.drafters.assistant.checkpoint import FILES
from dflash_mlx.drafters.assistant.model import FAMILY
from dflash_mlx.drafters.autoregressive import step_by_step

METHOD = step_by_step(FAMILY, "Gemma assistant", FILES)
