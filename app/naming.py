"""What methods, pairs and the sources of tokens are called on screen, and their colours.

The one place in the chat that knows methods and sources by name.
"""

from __future__ import annotations

from pathlib import Path

from dflash_mlx import DecodeConfig, Pair, settle

AUTO = "auto"
TARGET = "target"  # the source of a token that the target chose itself
_LABELS = {
    "none": "plain decoding",
    "ngram": "n-gram lookup",
    "dflash": "DFlash",
    "ddtree": "DFlash tree",
    "d2sd": "DFlash + variable-prefix",
}
_UNDRAFTED = (AUTO, "none", "ngram")  # methods that need no drafter network
_SOURCES = {  # as in `Tree.sources`, with a label and a style each
    "first": ("draft", "$text-success on $success-muted"),
    "second": ("second draft", "$text-primary on $primary-muted"),
    "lookup": ("lookup", "$text-warning on $warning-muted"),
    TARGET: ("target", "$foreground"),
}
_OTHER_STYLE = "$text-accent on $accent-muted"


def method_name(method: str, drafters: int) -> str:
    """A method for people. drafters: networks of the pair; one alone continues its own drafts."""
    if method == "d2sd" and drafters == 1:
        return "DFlash, continuing itself"
    return _LABELS.get(method, method)


def needs_drafter(method: str) -> bool:
    """Whether a method drafts with a network."""
    return method not in _UNDRAFTED


def source_style(source: str) -> str:
    """The style of tokens from `source`, one for all that have no style of their own."""
    return _SOURCES[source][1] if source in _SOURCES else _OTHER_STYLE


def legend() -> list[tuple[str, str]]:
    """Label and source of everything that tokens come from; the target is the last."""
    return [(label, source) for source, (label, _) in _SOURCES.items()]


def pair_line(pair: Pair | None, config: DecodeConfig) -> str:
    """The pair in the head line, "" before a model is loaded; of a folder only its own name."""
    if pair is None:
        return ""
    method, name = settle(config, pair.means).method, pair.target.name
    name = Path(name).name if name.startswith(("/", ".", "~")) else name
    return f"{name} <- {method_name(method, pair.means.drafters)}"
