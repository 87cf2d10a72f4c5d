"""What methods, pairs and the sources of tokens are called on screen, and their colours.

The table of methods says it; only the target's own tokens are named here.
"""

from __future__ import annotations

from pathlib import Path

from dflash_mlx import DecodeConfig, Pair, find_method, settle, token_sources

TARGET = "target"  # the source of a token that the target chose itself


def method_name(method: str, drafters: int) -> str:
    """A method for people. drafters: draft models of the pair."""
    return find_method(method).called(drafters)


def source_style(name: str) -> str:
    """The style of tokens from a source, one for all that have no colour of their own."""
    if name == TARGET:
        return "$foreground"
    colour = next((s.colour for s in token_sources() if s.name == name), "accent")
    return f"$text-{colour} on ${colour}-muted"


def legend() -> list[tuple[str, str]]:
    """Label and name of everything that tokens come from; the target is the last."""
    return [*((source.label, source.name) for source in token_sources()), (TARGET, TARGET)]


def pair_line(pair: Pair | None, config: DecodeConfig) -> str:
    """The pair in the head line, "" before a model is loaded; of a folder only its own name."""
    if pair is None:
        return ""
    method, name = settle(config, pair.means).method, pair.target.name
    name = Path(name).name if name.startswith(("/", ".", "~")) else name
    return f"{name} <- {method_name(method, pair.means.drafters)}"
