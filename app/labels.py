"""What the settings of decoding and sampling are called on screen, in the order of the screen."""

from __future__ import annotations

from dataclasses import fields

from dflash_mlx.client import DecodeConfig, SamplingConfig, label_in_words, own_options

DRAFTS = "How drafts are made and accepted"  # the options of single methods are here, too
OTHER = "Other"  # what nobody sorted
GROUPS = {
    "The answer": ("temperature", "max_tokens", "stop"),
    DRAFTS: ("method", "lookup", "budget", "block_size", "acceptance", "exact", "recalibrate"),
    "How the next token is drawn": (
        *("top_p", "top_k", "min_p", "repetition_penalty", "repetition_context"),
        *("presence_penalty", "frequency_penalty", "seed"),
    ),
    OTHER: (),
}


def label_of(name: str) -> str:
    """What a setting is called on screen; one that nobody named is called as in files."""
    known = (f for kind in (DecodeConfig, SamplingConfig, own_options()) for f in fields(kind))
    found = next((field for field in known if field.name == name), None)
    return name.replace("_", " ").capitalize() if found is None else label_in_words(found)
