"""The memory that a pair needs and what this machine has, before anything is loaded."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import mlx.core as mx

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Collector
from dflash_mlx.models.compatibility import HubRepository, LocalFolder
from dflash_mlx.models.compatibility.model_source import read_json
from dflash_mlx.models.compatibility.target_config import quantisation
from dflash_mlx.models.compatibility.weight_files import HEADROOM, Weights, check_weights
from dflash_mlx.models.compatibility.whole import TARGET_WEIGHTS, whole_snapshot
from dflash_mlx.models.default_model import DEFAULT_TARGET
from dflash_mlx.models.resolve import Names, find_names, shipped_folder
from dflash_mlx.system.machine import describe_machine

_DEFAULT_BITS = 5  # per weight of the embedded model's file, which becomes float32 on a CPU


def on_cpu() -> bool:
    """Whether MLX computes on the processor, where weights become float32."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def needed(folder: Path, pattern: str = "*.safetensors") -> int:
    """Bytes that the model in `folder` takes when loaded, 0 where the folder tells nothing.

    By the heads of its weight files. pattern: their names.
    """
    source = LocalFolder(folder)
    try:
        group_size = quantisation(read_json(source, "config.json"))[1]
    except DFlashError:
        return 0
    weights = check_weights(source, pattern, Collector())
    return Weights(weights.tensors, group_size).memory(on_cpu())


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


def needed_by_name(name: str, pattern: str = "*.safetensors") -> int:
    """`needed` for a folder or a Hugging Face id, without downloading; 0 where it is not known."""
    try:
        folder = shipped_folder(name) or Path(name).expanduser()
        there = folder if folder.is_dir() else whole_snapshot(name, pattern)
    except (OSError, RuntimeError, ValueError):
        return 0  # no such user's home, a name that is no path: loading says what is wrong
    return _needed_from_hub(name, pattern) if there is None else needed(there, pattern)


def _needed_from_hub(name: str, pattern: str) -> int:
    """From the sizes that the hub lists, of its folder's top; half precision is assumed."""
    try:
        files = HubRepository(name).files
    except DFlashError:
        return 0
    stored = sum(size for file, size in files.items() if fnmatch(file, pattern))
    return int(stored * HEADROOM * (2 if on_cpu() else 1))
