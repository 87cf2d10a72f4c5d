"""Lossless speculative decoding with block-diffusion drafters on MLX; docs/python.md has examples.

These are the public names, each imported when it is first asked for. Modules below may change.
"""

from dflash_mlx.system import terminal

terminal.begin()  # first, so that Ctrl+C ends a command quietly while it is still importing

from importlib import import_module  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from dflash_mlx.system import blas  # noqa: E402

blas.preload()  # must come before anything imports mlx

if TYPE_CHECKING:
    from dflash_mlx.core.config import DecodeConfig as DecodeConfig
    from dflash_mlx.core.config import PairConfig as PairConfig
    from dflash_mlx.core.config import SamplingConfig as SamplingConfig
    from dflash_mlx.core.config import StructureConfig as StructureConfig
    from dflash_mlx.core.errors import DFlashError as DFlashError
    from dflash_mlx.core.statistics import Statistics as Statistics
    from dflash_mlx.engine.delta import Answer as Answer
    from dflash_mlx.engine.delta import Delta as Delta
    from dflash_mlx.engine.pair import Pair as Pair
    from dflash_mlx.models.load import load as load
    from dflash_mlx.session.scheduler import Scheduler as Scheduler
    from dflash_mlx.session.session import Session as Session
    from dflash_mlx.session.session import generate as generate
    from dflash_mlx.session.session import stream as stream
    from dflash_mlx.session.templates import prompt_tokens as prompt_tokens

    __version__: str

_NAMES = {  # by the module that has them
    "core.config": ("DecodeConfig", "PairConfig", "SamplingConfig", "StructureConfig"),
    "core.errors": ("DFlashError",),
    "core.statistics": ("Statistics",),
    "engine.delta": ("Answer", "Delta"),
    "engine.pair": ("Pair",),
    "models.load": ("load",),
    "session.scheduler": ("Scheduler",),
    "session.session": ("Session", "generate", "stream"),
    "session.templates": ("prompt_tokens",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == "__version__":
        return version("dflash-chat")
    if name in _MODULES:
        value = getattr(import_module(f"dflash_mlx.{_MODULES[name]}"), name)
        return globals().setdefault(name, value)
    raise AttributeError(f"module 'dflash_mlx' has no attribute {name!r}")
