"""A whole training run: steps, measurements, saves, until the time or the steps are used up.

A run goes on exactly as it was left: weights, optimiser and place in the data are one file, which
replaces the one before at once, so that a kill leaves either of them whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import read_header
from dflash_mlx.train.acceptance import in_words, measure_drafts
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainer import Trainer

HISTORY = "history.jsonl"
STATE = Path("state") / "state.safetensors"

# The last four make the drafter, whose own configuration has to be the same.
_FREE_TO_CHANGE = ("minutes", "steps", "evaluate_minutes", "init", "layers", "taps", "block_size")
_NEXT_STEP = "repeat the settings it was started with, or choose another folder with --out"


@dataclass(frozen=True)
class Record:
    """A measurement."""

    step: int
    minutes: float
    loss: float | None  # mean since the one before, None before the first step
    tokens_per_second: float
    by_position: list[float]  # share of blocks whose first k drafts are all right
    by_prefix: list[float]  # right drafts after a kept prefix of 0, 1, ... tokens (DFlash: 0 only)

    @property
    def score(self) -> float:
        """What the best drafter has most of: the mean continuation over all prefixes."""
        return float(np.mean(self.by_prefix))

    def describe(self) -> str:
        found = in_words(self.by_position, self.by_prefix)
        parts = [f"step {self.step}", f"{self.minutes:.1f} min", found]
        if self.loss is not None:
            parts += [f"loss {self.loss:.3f}", f"{self.tokens_per_second:.0f} block tokens/s"]
        return " | ".join(parts)


class TrainingRun:
    """Trains into `folder`, or goes on: the best drafter so far, `state/`, and `history.jsonl`.

    data: identifies the corpora. Raises DFlashError for a damaged folder, and for another run's.
    """

    def __init__(self, trainer: Trainer, held_out: Texts, folder: Path, data: str) -> None:
        self.trainer, self.folder = trainer, folder
        self._held_out, self._data = held_out, data
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HISTORY).touch()
        if (folder / STATE).exists():
            restore_state(folder, trainer, data)
        self.history = read_history(folder / HISTORY, trainer.step)

    def __iter__(self) -> Iterator[float | Record]:
        """The loss of every step, and a record of every measurement, the last one at the end."""
        if not self.history:
            yield self.record([], 0.0)
        trainer = self.trainer
        since, before, losses = time.perf_counter(), trainer.tokens, []
        for loss in trainer.losses():
            losses.append(loss)
            yield loss
            spent = time.perf_counter() - since
            if spent > 60 * trainer.config.evaluate_minutes or trainer.progress >= 1:
                yield self.record(losses, (trainer.tokens - before) / spent)
                since, before, losses = time.perf_counter(), trainer.tokens, []

    def record(self, losses: list[float], speed: float) -> Record:
        """Measure, keep the drafter if it is the best so far, and save the state."""
        trainer = self.trainer
        variable = trainer.config.mode == "variable-prefix"
        loss = float(np.mean(losses)) if losses else None
        spent = trainer.step, round(trainer.seconds / 60, 2), loss, round(speed, 1)
        record = Record(*spent, *measure_drafts(trainer.trainee, self._held_out, variable))
        if record.score > max((r.score for r in self.history), default=-1.0):
            trainer.trainee.save(self.folder)
        save_state(self.folder, trainer, self._data)
        self.history.append(record)
        lines = [json.dumps(vars(record)) + "\n" for record in self.history]
        replace_text(self.folder / HISTORY, "".join(lines))
        return record


def check_out(folder: Path) -> None:
    """Raise DFlashError unless `folder` is new, empty, or holds a run to continue."""
    if not folder.exists() or (folder / STATE).exists():
        return
    history = folder / HISTORY  # made first; empty until the first state is complete
    stopped_early = history.exists() and not history.read_text(encoding="utf-8")
    if not folder.is_dir() or (any(folder.iterdir()) and not stopped_early):
        what = f"{folder} exists and holds no run to continue"
        raise DFlashError(what, "choose another folder with --out")


def read_history(file: Path, step: int) -> list[Record]:
    """Measurements up to `step`, where the state is; DFlashError for a damaged file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        records = [Record(**json.loads(line)) for line in lines if line.endswith("}")]
    except (ValueError, TypeError) as error:
        what = f"{file} cannot be read ({error})"
        instead = "correct it, or continue in another folder with --init"
        raise DFlashError(what, instead) from None
    return [record for record in records if record.step <= step]


def save_state(folder: Path, trainer: Trainer, data: str) -> None:
    """Write the state into `folder`; OSError leaves the one before. data: which corpora."""
    file = folder / STATE
    file.parent.mkdir(parents=True, exist_ok=True)
    place = {"step": trainer.step, "seconds": trainer.seconds, "tokens": trainer.tokens}
    about = {**place, "run": identity(trainer, data)}
    replace_safetensors(file, _arrays(trainer), {"about": json.dumps(about)})


def restore_state(folder: Path, trainer: Trainer, data: str) -> None:
    """Put `trainer` where the run in `folder` stopped.

    Raises DFlashError for a damaged state, and for a run with other settings, data or shapes.
    """
    file = folder / STATE
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
    for name, now in identity(trainer, data).items():
        if (was := before.get(name, now)) != now:  # an older program may have had no such field
            raise DFlashError(f"the run in {file} has {name} {was!r}, not {now!r}", _NEXT_STEP)
    own = {name: array.shape for name, array in _arrays(trainer).items()}
    if own != {name: array.shape for name, array in arrays.items()}:
        raise DFlashError(f"the drafter in {file} has other shapes than this one", _NEXT_STEP)
    trees: Any = tree_unflatten(list(arrays.items()))
    trainer.trainee.network.update(trees["network"])
    trainer.optimizer.state = trees["optimizer"]
    mx.eval(trainer.trainee.network.parameters(), trainer.optimizer.state)
    trainer.step, trainer.seconds, trainer.tokens = step, seconds, tokens


def identity(trainer: Trainer, data: str) -> dict[str, Any]:
    """What two runs must share for one to continue the other, as JSON has it."""
    settings = {k: v for k, v in asdict(trainer.config).items() if k not in _FREE_TO_CHANGE}
    drafter = {f"drafter's {k}": v for k, v in asdict(trainer.trainee.config).items()}
    return dict(json.loads(json.dumps({**settings, "data": data, **drafter})))


def _arrays(trainer: Trainer) -> dict[str, mx.array]:
    trees = {"network": trainer.trainee.network.parameters(), "optimizer": trainer.optimizer.state}
    return dict(tree_flatten(trees))
