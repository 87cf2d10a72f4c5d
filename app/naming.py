"""What methods and pairs are called on screen."""

from __future__ import annotations

from pathlib import Path

from dflash_chat.messages import ModelInfo
from dflash_mlx import DecodeConfig
from dflash_mlx.drafters.methods import settle

_METHODS = {
    "none": "plain decoding",
    "ngram": "n-gram lookup",
    "dflash": "DFlash",
    "ddtree": "DFlash tree",
    "d2sd": "DFlash + variable-prefix",
}


def method_name(method: str, drafters: int) -> str:
    """A method for people. drafters: networks of the pair; one alone continues its own drafts."""
    if method == "d2sd" and drafters == 1:
        return "DFlash, continuing itself"
    return _METHODS.get(method, method)


def pair_line(info: ModelInfo | None, config: DecodeConfig) -> str:
    """The pair in the head line, "" before a model is loaded; of a folder only its own name."""
    if info is None:
        return ""
    method = settle(config, info.means).method
    name = Path(info.name).name if info.name.startswith(("/", ".", "~")) else info.name
    return f"{name} <- {method_name(method, info.means.drafters)}"
