"""Pictures of docs/roofline.md: `.venv/bin/python scripts/roofline_plots.py docs`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
from roofline import CONTEXT, ROWS, Traffic, chain, pass_time, speedup
from roofline_data import MACHINES, TARGETS
from roofline_products import fastest, stock

SHOWN = ("M1 Max", "M4 Max", "M5 Max")
RANGE = (0.75, 1.25)  # of what is assumed of the arithmetic


def draw(traffic: Traffic, folder: Path) -> None:
    """Save all of them as PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, draw_one in (
        ("rows", _rows),
        ("blocks", _blocks),
        ("attention", _attention),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        draw_one(axes, traffic)
        axes.grid(alpha=0.3)
        figure.savefig(folder / f"roofline_{name}.png", dpi=110)
        pyplot.close(figure)


def _rows(axes: Any, traffic: Traffic) -> None:
    """Cost of a pass over plain decoding, by rows."""
    target = TARGETS["Qwen3-8B"]
    rows = range(1, 33)
    for bits, colour in ((4, "C0"), (8, "C1"), (16, "C2")):
        lines = []
        for factor in (1.0, *RANGE):
            machine = MACHINES["M4 Max"]
            machine = replace(machine, tflops=machine.tflops * factor)
            plain = pass_time(machine, target, bits, 1, traffic).seconds
            times = [pass_time(machine, target, bits, n, traffic).seconds for n in rows]
            lines.append([time / plain for time in times])
        axes.plot(rows, lines[0], colour, label=f"{bits} bits")
        axes.fill_between(rows, lines[1], lines[2], color=colour, alpha=0.15, linewidth=0)
    machine, alone = MACHINES["M4 Max"], []
    for n in rows:
        ways = stock(machine, n, 4), fastest(machine, target.weights, 4, n)
        own, least = (way.seconds(machine, target.weights, 4) for way in ways)
        alone.append(pass_time(machine, target, 4, n, traffic).seconds + own - least)
    axes.plot(rows, [time / alone[0] for time in alone], "C0:", label="4 bits, by MLX alone")
    axes.set(xlabel="rows verified", ylabel="time of the pass / plain pass", ylim=(0, 6))
    axes.set_title("Qwen3-8B on an M4 Max, predicted; bands: a quarter less or more arithmetic")
    axes.legend()


def _blocks(axes: Any, traffic: Traffic) -> None:
    """Predicted speed-up by block size."""
    target = TARGETS["Qwen3-8B"]
    blocks = range(2, 17)
    for name, colour in zip(SHOWN, ("C0", "C1", "C2"), strict=True):
        for bits, style in ((4, "-"), (8, "--"), (16, ":")):
            gains = [speedup(MACHINES[name], target, bits, chain(n), traffic) for n in blocks]
            axes.plot(blocks, gains, colour + style, label=f"{name}, {bits} bits")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="block size", ylabel="speed-up over plain decoding")
    axes.set_title("Qwen3-8B with DFlash, predicted; acceptance published for block 16 only")
    axes.legend(fontsize=7)


def _attention(axes: Any, traffic: Traffic) -> None:
    """Bytes of one layer's attention, as the emulator counts them."""
    for name, colour in (("SmolLM2-135M", "C0"), ("Qwen3-1.7B", "C1"), ("Qwen3-8B", "C2")):
        pairs = [traffic.attention[name][rows] for rows in ROWS]
        axes.plot(ROWS, [keys / 1e6 for keys, _ in pairs], colour + "--")
        axes.plot(ROWS, [sum(p) / 1e6 for p in pairs], colour, label=name)
    axes.set(xlabel="query rows", ylabel="MB for one layer", yscale="log", xscale="log")
    axes.set_xticks(ROWS, map(str, ROWS))
    axes.set_title(f"cascade_attention behind {CONTEXT} keys, emulated; dashed: keys and values")
    axes.legend()


if __name__ == "__main__":
    draw(Traffic.read(), Path(sys.argv[1]))
