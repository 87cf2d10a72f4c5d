"""Stopping and going on: weights, optimiser and place in the data, exactly as they were."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import read_header
from dflash_mlx.train.trainer import Trainer

_FREE_TO_CHANGE = ("minutes", "steps", "evaluate_minutes", "init")
_BEFORE = {"soft": 0.0, "anchor_law": "even"}  # what states older than a setting have
_NEXT_STEP = "repeat the settings it was started with, or choose another folder with --out"


def identity(trainer: Trainer, data: str) -> dict[str, Any]:
    """What two runs must share for one to continue the other. data: which corpora."""
    settings = asdict(trainer.config)
    for name in _FREE_TO_CHANGE:
        del settings[name]
    return {**settings, "data": data}


def save_state(folder: Path, trainer: Trainer, data: str) -> None:
    """Write the state to `folder`/state; the one before stays until the new one is complete."""
    place, fresh, old = (folder / name for name in ("state", "state-new", "state-old"))
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    replace_safetensors(fresh / "arrays.safetensors", _arrays(trainer), {})
    about = {
        "step": trainer.step,
        "seconds": trainer.seconds,
        "tokens": trainer.tokens,
        "run": identity(trainer, data),
        "drafter": _drafter(trainer),
    }
    replace_text(fresh / "state.json", json.dumps(about, indent=1))
    if place.exists():  # otherwise the old one is all there is
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def has_state(folder: Path) -> bool:
    """Whether a run can be continued from `folder`."""
    return _latest(folder) is not None


def restore_state(folder: Path, trainer: Trainer, data: str) -> None:
    """Put `trainer` where the run in `folder` stopped.

    Raises DFlashError for a damaged state, and for a run with other settings, data or shapes.
    """
    place = _latest(folder)
    assert place is not None
    again = f"start from the drafter beside it with --init {folder}"
    try:
        about = json.loads((place / "state.json").read_text(encoding="utf-8"))
        read_header(place / "arrays.safetensors", f"delete it and {again}")
        arrays = dict(mx.load(str(place / "arrays.safetensors")))  # type: ignore[arg-type]
        step, tokens = int(about["step"]), int(about["tokens"])
        seconds = float(about["seconds"])
        run = {**_BEFORE, **about["run"]}
        drafter = dict(about.get("drafter", _drafter(trainer)))  # older states do not say
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise DFlashError(
            f"the state in {place} cannot be read ({error})",
            f"delete it and {again}",
        ) from None
    _check_same(place, run | drafter, identity(trainer, data) | _drafter(trainer))
    own = {name: array.shape for name, array in _arrays(trainer).items()}
    if own != {name: array.shape for name, array in arrays.items()}:
        raise DFlashError(f"the drafter in {place} has other shapes than this one", _NEXT_STEP)
    trainer.network.update(_tree(arrays, "network."))
    trainer.optimizer.state = _tree(arrays, "optimizer.")
    trainer.step, trainer.seconds, trainer.tokens = step, seconds, tokens
    mx.eval(trainer.network.parameters(), trainer.optimizer.state)


def _latest(folder: Path) -> Path | None:
    """The newest complete state: a kill between two renames leaves only the old one in place."""
    names = ("state", "state-old")
    return next((folder / n for n in names if (folder / n / "state.json").exists()), None)


def _check_same(place: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in now:
        if before.get(name) != now[name]:
            raise DFlashError(
                f"the run in {place} has {name} {before.get(name)!r}, not {now[name]!r}",
                _NEXT_STEP,
            )


def _drafter(trainer: Trainer) -> dict[str, Any]:
    """The drafter's configuration, as JSON has it."""
    config: dict[str, Any] = json.loads(json.dumps(asdict(trainer.network_config)))
    return {f"drafter's {name}": value for name, value in config.items()}


def _arrays(trainer: Trainer) -> dict[str, mx.array]:
    """Weights, and all that the optimiser remembers."""
    trees = {"network": trainer.network.parameters(), "optimizer": trainer.optimizer.state}
    return {f"{part}.{k}": v for part, tree in trees.items() for k, v in _flat(tree)}


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    return tree_flatten(tree)  # type: ignore[return-value]


def _tree(arrays: dict[str, mx.array], prefix: str) -> Any:
    return tree_unflatten(
        [(name[len(prefix) :], array) for name, array in arrays.items() if name.startswith(prefix)]
    )
