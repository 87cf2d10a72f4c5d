"""How much memory and disk a model takes: by the heads of its weight files, or by its name.

A name is a Hugging Face id or a folder, as in Qwen/Qwen3-4B-4bit: 4 billion weights of 4 bits.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import Collector, DFlashError
from dflash_mlx.core.text import amount
from dflash_mlx.models.default_model import DEFAULT_TARGET
from dflash_mlx.models.names import Names, find_names, find_source
from dflash_mlx.models.source import CONFIG, MODEL, Source
from dflash_mlx.models.weight_files import HEADROOM, check_weights
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import describe_machine

FEWEST_BITS = 4  # of the quantisation that sizes are given for, where nothing is chosen yet
_DEFAULT_BITS = 5  # per weight of the embedded model's file, which becomes float32 on a CPU
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


def available_memory() -> int:
    """Bytes that can be had: what Linux calls available, elsewhere all that is installed."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return int(describe_machine()["memory_bytes"])


def memory_needed(needs: int, there: int, about: str = "") -> str:
    """What a model needs, and whether that is there. about: before an amount that is a guess."""
    fits = "fits" if needs <= there else "does not fit"
    return f"needs {about}{amount(needs)}, {fits}"


def check_memory(config: PairConfig, machines: int = 1) -> None:
    """Raise DFlashError for a pair that does not fit; nothing is downloaded.

    machines: that share the target.
    """
    names = find_names(config)
    needs, there = needed_by(names, machines), available_memory()
    if needs > there:
        has = f"needs about {amount(needs)} of memory, and {amount(there)} are there"
        step = "choose a smaller or a quantised model, or close other programs"
        raise DFlashError(f"{names.shown} {has}", step)


def needed_by(names: Names, machines: int = 1) -> int:
    """Of a target with its drafters, without downloading; what is not known counts nothing.

    Of what is not here the hub lists the sizes, and its name tells the bits of a weight. machines:
    that share the target.
    """
    total = 0
    if names.model is None:
        whole = DEFAULT_TARGET.size * HEADROOM * (32 / _DEFAULT_BITS if on_cpu() else 1)
        total = int(whole / machines)
    for name, option in names.parts:
        with suppress(DFlashError):  # loading says what is wrong
            part = needed(find_source(name, option, update=False))
            total += part // machines if option == MODEL else part
    return total


def needed(source: Source) -> int:
    """Bytes that a model takes when loaded, 0 for a folder that does not tell."""
    if source.folder is None:
        stored = sum(s for file, s in source.files.items() if fnmatch(file, source.weights))
        return loaded_bytes(stored, bits_of(source.name), on_cpu())
    with suppress(DFlashError):
        raw = source.read_json(CONFIG)
        return check_weights(source, raw, Collector(), "").memory(on_cpu())
    return 0
