"""Stopping and going on: weights, optimiser and place in the data, exactly as they were.

All of it is one file, which replaces the one before at once: a kill leaves either of them whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_safetensors
from dflash_mlx.system.safetensors_header import read_header
from dflash_mlx.train.trainer import Trainer

_FREE_TO_CHANGE = ("minutes", "steps", "evaluate_minutes", "init")
_NEXT_STEP = "repeat the settings it was started with, or choose another folder with --out"


def save_state(folder: Path, trainer: Trainer, data: str) -> None:
    """Write the state into `folder`/state; OSError leaves the one before. data: which corpora."""
    file = _file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    place = {"step": trainer.step, "seconds": trainer.seconds, "tokens": trainer.tokens}
    about = {**place, "run": _identity(trainer, data)}
    replace_safetensors(file, _arrays(trainer), {"about": json.dumps(about)})


def has_state(folder: Path) -> bool:
    """Whether a run can be continued from `folder`."""
    return _file(folder).exists()


def restore_state(folder: Path, trainer: Trainer, data: str) -> None:
    """Put `trainer` where the run in `folder` stopped.

    Raises DFlashError for a damaged state, and for a run with other settings, data or shapes.
    """
    file = _file(folder)
    again = f"delete it and start from the drafter beside it with --init {folder}"
    try:
        read_header(file, again)
        loaded: Any = mx.load(str(file), return_metadata=True)
        arrays, metadata = loaded
        about = json.loads(metadata["about"])
        step, tokens = int(about["step"]), int(about["tokens"])
        seconds, before = float(about["seconds"]), dict(about["run"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DFlashError(f"the state {file} cannot be read ({error})", again) from None
    for name, now in _identity(trainer, data).items():
        if before.get(name) != now:
            raise DFlashError(
                f"the run in {file} has {name} {before.get(name)!r}, not {now!r}", _NEXT_STEP
            )
    own = {name: array.shape for name, array in _arrays(trainer).items()}
    if own != {name: array.shape for name, array in arrays.items()}:
        raise DFlashError(f"the drafter in {file} has other shapes than this one", _NEXT_STEP)
    trees: Any = tree_unflatten(list(arrays.items()))
    trainer.trainee.network.update(trees["network"])
    trainer.optimizer.state = trees["optimizer"]
    trainer.step, trainer.seconds, trainer.tokens = step, seconds, tokens
    mx.eval(trainer.trainee.network.parameters(), trainer.optimizer.state)


def _file(folder: Path) -> Path:
    return folder / "state" / "state.safetensors"


def _identity(trainer: Trainer, data: str) -> dict[str, Any]:
    """What two runs must share for one to continue the other, as JSON has it."""
    settings = asdict(trainer.config)
    for name in _FREE_TO_CHANGE:
        del settings[name]
    drafter = {f"drafter's {k}": v for k, v in asdict(trainer.trainee.config).items()}
    run: dict[str, Any] = json.loads(json.dumps({**settings, "data": data, **drafter}))
    return run


def _arrays(trainer: Trainer) -> dict[str, mx.array]:
    """Weights, and all that the optimiser remembers."""
    trees = {"network": trainer.trainee.network.parameters(), "optimizer": trainer.optimizer.state}
    return dict(tree_flatten(trees))
