"""The course of a training run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.cli.plotting import import_pyplot
from dflash_mlx.train.run import Record


def plot_history(history: Sequence[Record], file: Path) -> None:
    """Loss, tokens per round and acceptance by position against minutes, as a PNG.

    Raises DFlashError without matplotlib.
    """
    pyplot = import_pyplot()
    figure, (losses, rounds, positions) = pyplot.subplots(1, 3, figsize=(12, 3.6))
    minutes = [record.minutes for record in history]
    after = [record for record in history if record.loss is not None]
    losses.plot([record.minutes for record in after], [record.loss for record in after], ".-")
    losses.set(title="Loss (weighted)", xlabel="minutes")
    for prefix in range(len(history[0].by_prefix)):
        values = [1 + record.by_prefix[prefix] for record in history]
        rounds.plot(minutes, values, ".-", label=f"prefix {prefix}")
    rounds.set(title="Held out: 1 + right drafts after a prefix", xlabel="minutes")
    for k in range(len(history[0].by_position)):
        shares = [record.by_position[k] for record in history]
        positions.plot(minutes, shares, ".-", label=f"first {k + 1}")
    positions.set(title="Held out: first k drafts all right", xlabel="minutes", ylim=(0, 1))
    for axes in (rounds, positions):
        axes.legend(fontsize=7)
    for axes in (losses, rounds, positions):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
