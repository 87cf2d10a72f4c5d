"""What methods, pairs and the sources of tokens are called on screen, and how they look.

The table of methods says it; only the target's own tokens are named here.
"""

from __future__ import annotations

from pathlib import Path

from dflash_mlx.client import Capabilities, DecodeConfig, Pair, find_method, settle, token_sources

TARGET = "target"  # the source of a token that the target chose itself
ALONE = "not guessed"
# Of drafted tokens, where nothing has colour.
_SHAPES = ("underline", "underline italic", "italic", "bold", "bold italic")


def method_name(method: str, capabilities: Capabilities) -> str:
    """A method for people. capabilities: of the pair."""
    return find_method(method).called(capabilities)


def source_style(name: str) -> str:
    """The style of tokens from a source, one for all that have no colour of their own."""
    if name == TARGET:
        return "$foreground"
    colour = next((s.colour for s in token_sources() if s.name == name), "error")
    return f"$text-{colour} on ${colour}-muted"


def source_shape(name: str) -> str:
    """A style without colours: drafted tokens underlined or slanted, the target's own plain."""
    if name == TARGET:
        return ""
    known = [source.name for source in token_sources()]
    return _SHAPES[known.index(name) % len(_SHAPES) if name in known else -1]


def legend() -> list[tuple[str, str]]:
    """Label and name of everything that tokens come from; the target is the last."""
    return [*((source.label, source.name) for source in token_sources()), (ALONE, TARGET)]


def short_name(name: str) -> str:
    """A target for people; of a folder only its own name."""
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def pair_line(pair: Pair | None, config: DecodeConfig) -> str:
    """The pair in the head line, "" before a model is loaded."""
    if pair is None:
        return ""
    method = settle(config, pair.capabilities).method
    return f"{short_name(pair.target.name)} <- {method_name(method, pair.capabilities)}"
