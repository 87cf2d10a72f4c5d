"""Lossless speculative decoding with block-diffusion drafters on MLX; README.md has examples."""

from dflash_mlx.system import blas

blas.preload()  # must come before anything imports mlx

from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig  # noqa: E402
from dflash_mlx.core.errors import DFlashError  # noqa: E402
from dflash_mlx.core.observer import Observer, RoundTimer  # noqa: E402
from dflash_mlx.core.statistics import Statistics  # noqa: E402
from dflash_mlx.engine.pair import Pair  # noqa: E402
from dflash_mlx.models.load import load  # noqa: E402
from dflash_mlx.session.chat import prompt_tokens  # noqa: E402
from dflash_mlx.session.stream import Answer, Session, TextDelta, generate, stream  # noqa: E402

__all__ = [
    "Answer",
    "DFlashError",
    "DecodeConfig",
    "Observer",
    "Pair",
    "PairConfig",
    "RoundTimer",
    "SamplingConfig",
    "Session",
    "Statistics",
    "TextDelta",
    "generate",
    "load",
    "prompt_tokens",
    "stream",
]
