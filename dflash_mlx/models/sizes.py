"""What a model's name tells of its size, before a hub has been asked.

A name is a Hugging Face id or a folder, as in Qwen/Qwen3-4B-4bit: 4 billion weights of 4 bits.
"""

from __future__ import annotations

import re

from dflash_mlx.models.weight_files import HEADROOM

_SCALES = 0.5  # bits that quantisation adds to each weight: a scale and an offset of 16 bits for 64
_BITS = re.compile(
    r"[-_](?:(\d+(?:\.\d+)?)-?(?:bits?|bpw)|(?:(?:mx|nv)?fp|b?float|bf|int|q)(\d+))(?![a-z0-9])"
)
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])")


def bits_of(name: str) -> float:
    """Bits of a weight as it is stored, without scales; 16 where the name does not say."""
    found = _BITS.search(_last(name))
    return float(found[1] or found[2]) if found else 16.0


def weights_of(name: str, billions: float = 0) -> float:
    """How many weights a model has, 0 where neither its name nor `billions` tells."""
    found = _BILLIONS.search(_last(name))
    if billions or not found:
        return billions * 1e9
    return float(found[1]) * (1e9 if found[2] == "b" else 1e6)


def stored_bytes(weights: float, bits: float) -> int:
    """Bytes of as many weights on disk, with their scales."""
    return int(weights * (bits + _SCALES * (bits < 16)) / 8)


def loaded_bytes(stored: float, bits: float, on_cpu: bool) -> int:
    """Bytes of memory for weights of `bits`, with room for caches. on_cpu: as float32 there."""
    wider = 32 / (bits + _SCALES * (bits < 16)) if on_cpu else 1
    return int(stored * wider * HEADROOM)


def _last(name: str) -> str:
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
