"""Lossless speculative decoding with block-diffusion drafters on MLX; README.md has examples."""

from dflash_mlx import blas

blas.preload()  # must come before anything imports mlx

from dflash_mlx.chat import prompt_tokens  # noqa: E402
from dflash_mlx.config import DecodeConfig, PairConfig, SamplingConfig  # noqa: E402
from dflash_mlx.errors import DFlashError  # noqa: E402
from dflash_mlx.generate import generate  # noqa: E402
from dflash_mlx.load import Pair, load  # noqa: E402
from dflash_mlx.observer import Observer, RoundTimer  # noqa: E402
from dflash_mlx.statistics import Statistics  # noqa: E402
from dflash_mlx.stream import Answer, Session, TextDelta, stream  # noqa: E402

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
