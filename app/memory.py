"""Memory that a model needs against memory that is there, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

from dflash_chat.figures import gigabytes
from dflash_mlx import DFlashError
from dflash_mlx.machine import describe_machine

HEADROOM = 1.15  # caches and temporary arrays, as a share of the weights
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


def needed(folder: Path, on_cpu: bool) -> int:
    """Bytes that the model in `folder` takes when loaded; 0 where the folder tells nothing.

    on_cpu: weights become float32 there, whatever they are stored as.
    """
    try:
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(stored * HEADROOM * (32 / stored_bits(config) if on_cpu else 1))
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def stored_bits(config: dict[str, object]) -> float:
    """Bits per weight as a config.json tells them; quantised ones with scale and bias per group."""
    quantised = config.get("quantization") or config.get("quantization_config")
    if isinstance(quantised, dict) and isinstance(quantised.get("bits"), int):
        return float(quantised["bits"] + 32 / (quantised.get("group_size") or 64))
    return _BITS.get(str(config.get("dtype") or config.get("torch_dtype")), 16)


def available() -> int:
    """Bytes that can be had: what Linux calls available, elsewhere all that is installed."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return int(describe_machine()["memory_bytes"])


def check(name: str, needs: int, there: int) -> None:
    """Raise DFlashError where a model does not fit."""
    if needs > there:
        raise DFlashError(
            f"{name} needs about {gigabytes(needs)} of memory, and {gigabytes(there)} are there",
            "choose a smaller or a quantised model, or close other programs",
        )


def needed_by_name(name: str) -> int:
    """`needed` for a folder or a Hugging Face id, without downloading; 0 where it is not known."""
    on_cpu = bool(mx.default_device() == mx.Device(mx.cpu))
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(name, local_files_only=True))
        return needed(folder, on_cpu)
    except (LocalEntryNotFoundError, FileNotFoundError):
        return _needed_from_hub(name, on_cpu)
    except (OSError, RuntimeError, ValueError):
        return 0  # no such user's home, a name that is no id: loading says what is wrong


def _needed_from_hub(name: str, on_cpu: bool) -> int:
    """From the sizes that the hub lists; half-precision weights are assumed."""
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10).siblings or []
    except (OSError, HTTPError, ValueError):
        return 0
    stored = sum(f.size or 0 for f in files if f.rfilename.endswith(".safetensors"))
    return int(stored * HEADROOM * (2 if on_cpu else 1))
