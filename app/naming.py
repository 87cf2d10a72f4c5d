"""What methods and pairs are called on screen."""

from __future__ import annotations

from dflash_chat.messages import ModelInfo

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


def pair_line(info: ModelInfo | None, method: str) -> str:
    """The pair in the head line, "" before a model is loaded."""
    return f"{info.name} <- {method_name(method, info.drafters)}" if info else ""
