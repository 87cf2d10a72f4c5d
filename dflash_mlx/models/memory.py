"""The memory that a pair needs and what this machine has, before anything is loaded."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Collector
from dflash_mlx.models.default_model import DEFAULT_TARGET
from dflash_mlx.models.names import Names, find_names, find_source
from dflash_mlx.models.source import CONFIG, TARGET_WEIGHTS, WEIGHTS, Source
from dflash_mlx.models.weight_files import HEADROOM, check_weights
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.system.machine import describe_machine

_DEFAULT_BITS = 5  # per weight of the embedded model's file, which becomes float32 on a CPU


def needed(folder: Path | Source, pattern: str = WEIGHTS) -> int:
    """Bytes that the model in `folder` takes when loaded, 0 where the folder tells nothing.

    By the heads of its weight files. pattern: their names.
    """
    source = Source.of(folder) if isinstance(folder, Path) else folder
    try:
        raw = source.read_json(CONFIG)
    except DFlashError:
        return 0
    return check_weights(source, raw, pattern, Collector(), "").memory(on_cpu())


def available_memory() -> int:
    """Bytes that can be had: what Linux calls available, elsewhere all that is installed."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return int(describe_machine()["memory_bytes"])


def check_memory(config: PairConfig) -> None:
    """Raise DFlashError for a pair that does not fit; nothing is downloaded."""
    names = find_names(config)
    needs, there = needed_by(names), available_memory()
    if needs > there:
        raise DFlashError(
            f"{names.shown} needs about {needs / 1e9:.2f} GB of memory, and {there / 1e9:.2f} GB "
            "are there",
            "choose a smaller or a quantised model, or close other programs",
        )


def needed_by(names: Names) -> int:
    """Of a target with its drafters, without downloading; what is not known counts nothing."""
    if names.model is None:
        target = int(DEFAULT_TARGET.size * HEADROOM * (32 / _DEFAULT_BITS if on_cpu() else 1))
    else:
        target = needed_by_name(names.model, TARGET_WEIGHTS)
    drafters = (name for name in (names.drafter, names.second_drafter) if name is not None)
    return target + sum(needed_by_name(name) for name in drafters)


def needed_by_name(name: str, pattern: str = WEIGHTS) -> int:
    """`needed` for a folder or a Hugging Face id, without downloading; 0 where it is not known.

    On the hub from the sizes that it lists; half precision is assumed.
    """
    option = "model" if pattern == TARGET_WEIGHTS else "drafter"
    try:
        source = find_source(name, option, update=False)
        if source.folder is not None:
            return needed(source, pattern)
        stored = sum(size for file, size in source.files.items() if fnmatch(file, pattern))
    except DFlashError:  # loading says what is wrong
        return 0
    return int(stored * HEADROOM * (2 if on_cpu() else 1))
