"""A whole training run: steps, measurements, saves, until the time or the steps are used up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_mlx.cli.plotting import import_pyplot
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_text
from dflash_mlx.train.data import Texts
from dflash_mlx.train.evaluate import measure, shares
from dflash_mlx.train.state import save_state
from dflash_mlx.train.trainer import Trainer

HISTORY = "history.jsonl"


@dataclass(frozen=True)
class Record:
    """A measurement. loss: mean since the one before, None before the first step.

    by_prefix: mean correct continuation after a kept prefix of 0, 1, ... tokens (DFlash: 0 only).
    by_position: share of blocks whose first k drafts are all right, without a prefix.
    """

    step: int
    minutes: float
    loss: float | None
    tokens_per_second: float
    by_position: list[float]
    by_prefix: list[float]

    @property
    def tokens_per_round(self) -> float:
        """1 + mean accepted drafts of a whole block."""
        return 1 + self.by_prefix[0]

    @property
    def score(self) -> float:
        """What the best drafter has most of: the mean continuation over all prefixes."""
        return float(np.mean(self.by_prefix))

    def describe(self) -> str:
        """One line for people."""
        parts = [
            f"step {self.step}",
            f"{self.minutes:.1f} min",
            f"{self.tokens_per_round:.3f} tokens/round",
            f"by position {shares(self.by_position)}",
        ]
        if len(self.by_prefix) > 1:
            prefixes = " ".join(f"{length:.2f}" for length in self.by_prefix)
            parts.append(f"continuation by prefix {prefixes}")
        if self.loss is not None:
            parts += [f"loss {self.loss:.3f}", f"{self.tokens_per_second:.0f} block tokens/s"]
        return " | ".join(parts)


class TrainingRun:
    """Trains into `folder`: the best drafter so far, `state/`, and `history.jsonl`.

    data: identifies the corpora.
    """

    def __init__(self, trainer: Trainer, held_out: Texts, folder: Path, data: str) -> None:
        self.trainer, self.folder = trainer, folder
        self._held_out, self._data = held_out, data
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
        prefixes = range(trainer.trainee.config.block_size - 1 if variable else 1)
        results = [measure(trainer.trainee, self._held_out, prefix) for prefix in prefixes]
        record = Record(
            step=trainer.step,
            minutes=round(trainer.seconds / 60, 2),
            loss=float(np.mean(losses)) if losses else None,
            tokens_per_second=round(speed, 1),
            by_position=results[0].by_position,
            by_prefix=[result.tokens_per_round - 1 for result in results],
        )
        if record.score > max((r.score for r in self.history), default=-1.0):
            trainer.trainee.save(self.folder)
        save_state(self.folder, trainer, self._data)
        self.history.append(record)
        lines = [json.dumps(vars(record)) + "\n" for record in self.history]
        replace_text(self.folder / HISTORY, "".join(lines))
        return record


def read_history(file: Path, step: int) -> list[Record]:
    """Measurements up to `step`; a run that was killed may have gone further than its state.

    Raises DFlashError for a damaged file.
    """
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        records = [Record(**json.loads(line)) for line in lines if line.endswith("}")]
    except (ValueError, TypeError) as error:
        raise DFlashError(
            f"{file} cannot be read ({error})",
            "put it right, or go on in another folder with --init",
        ) from None
    return [record for record in records if record.step <= step]


def plot_history(history: Sequence[Record], file: Path) -> None:
    """Loss, tokens per round and acceptance by position against minutes, as a PNG.

    Raises DFlashError without matplotlib.
    """
    pyplot = import_pyplot()
    figure, (losses, rounds, positions) = pyplot.subplots(1, 3, figsize=(12, 3.6))
    minutes = [record.minutes for record in history]
    measured = [np.nan if record.loss is None else record.loss for record in history]
    losses.plot(minutes, measured, ".-")
    losses.set(title="Loss (weighted)")
    for prefix in range(len(history[0].by_prefix)):
        values = [1 + record.by_prefix[prefix] for record in history]
        rounds.plot(minutes, values, ".-", label=f"prefix {prefix}")
    rounds.set(title="Held out: 1 + right drafts after a prefix")
    for k in range(len(history[0].by_position)):
        values = [record.by_position[k] for record in history]
        positions.plot(minutes, values, ".-", label=f"first {k + 1}")
    positions.set(title="Held out: first k drafts all right", ylim=(0, 1))
    for axes in (losses, rounds, positions):
        axes.set_xlabel("minutes")
        axes.grid(alpha=0.3)
    rounds.legend(fontsize=7)
    positions.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
