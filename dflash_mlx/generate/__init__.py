"""One finished answer; `python -m dflash_mlx.generate` is the command line."""

from __future__ import annotations

from dflash_mlx.chat import Prompt
from dflash_mlx.config import DecodeConfig
from dflash_mlx.load import Pair
from dflash_mlx.stream import Answer, collect, stream


def generate(
    pair: Pair,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    system: str | None = None,
) -> Answer:
    """The whole answer to one prompt; arguments and errors as for `stream`."""
    return collect(stream(pair, prompt, config, system))
