"""A draft network's low-rank delta (LoRA, arXiv 2106.09685), learned here from its user's texts."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import platformdirs
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.drafters.networks.files import KEPT
from dflash_mlx.system.files import replace_safetensors

RANK, SCALE = 8, 4.0  # scale * x @ lora_a @ lora_b beside x @ a matrix; files are for these
COMMAND = "python -m dflash_mlx.train.adapt"
_BEGINNING = 1 << 20  # bytes of a file that tell drafters apart: its header and first numbers


def file_of(drafter: Path, target: str) -> Path:
    """Where the delta of the drafter in a folder is kept, whether there is one or not."""
    digest = hashlib.sha256(target.encode())
    for file in sorted(drafter.glob("*.safetensors")):
        with file.open("rb") as contents:
            digest.update(contents.read(_BEGINNING))
    folder = platformdirs.user_cache_path("dflash-chat") / "adapters"
    return folder / f"{digest.hexdigest()[:16]}.safetensors"


def attach(file: Path, network: nn.Module) -> None:
    """Put the delta that is kept, or zero, beside every matrix; it alone is trained then."""
    network.freeze()
    network.update_modules(tree_unflatten([*_read(file, network).items()]))


def keep(file: Path, network: nn.Module) -> None:
    """Write the attached delta, the one before for `undo`; DFlashError where the disk says no."""
    delta: Any = tree_flatten(network.trainable_parameters())
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists():
            shutil.copy(file, file.with_suffix(".previous"))
        replace_safetensors(file, dict(delta), {}, private=True)
    except (OSError, RuntimeError) as error:
        what = f"what the draft model learned cannot be written to {file} ({in_one_line(error)})"
        raise DFlashError(what, "make room there; it drafts as before") from None


def undo(file: Path) -> None:
    """Go back to the delta before, or to the drafter as published; DFlashError where it is so."""
    if not file.exists():
        raise DFlashError("nothing was adapted", f"{COMMAND} adapts the draft model")
    file.unlink()
    if (previous := file.with_suffix(".previous")).exists():
        previous.rename(file)


def add_to(network: nn.Module, file: Path) -> str:
    """Add the delta that is kept to the weights; a sentence that says so, or why it cannot be."""
    try:
        beside, matrices = _read(file, network), _matrices(network)
    except DFlashError as error:  # drafts alone depend on it
        return str(error)
    for name, each in beside.items():
        matrices[name].update(each.fuse().parameters())
    mx.eval(network.parameters())
    return "drafts are adapted to your own texts"


def _read(file: Path, network: nn.Module) -> dict[str, Any]:
    """A delta for every matrix, by its name; of zero where there is no file."""
    from mlx_lm.tuner.lora import LoRALinear  # takes seconds

    matrices = _matrices(network).items()
    beside: Any = {n: LoRALinear.from_base(m, RANK, scale=SCALE) for n, m in matrices}
    try:
        kept: Any = mx.load(str(file)) if file.exists() else {}
        for name, array in kept.items():
            of, _, part = name.rpartition(".")
            if array.shape != beside[of][part].shape:
                raise ValueError(f"{name} has another shape")
            beside[of][part] = array
        mx.eval(kept)
    except (KeyError, ValueError, RuntimeError) as error:
        what = f"what the draft model learned cannot be read from {file} ({in_one_line(error)})"
        raise DFlashError(what, f"{COMMAND} --undo leaves it out") from None
    return beside  # type: ignore[no-any-return]


def _matrices(network: nn.Module) -> dict[str, Any]:
    kinds = nn.Linear, nn.QuantizedLinear
    named = ((name, each) for name, each in network.named_modules() if isinstance(each, kinds))
    return {name: each for name, each in named if not any(part in name for part in KEPT)}
