"""The logits of every format against the published module that reads it, where a package has one.

    python scripts/compare_formats.py PYTHON [PYTHON ...]

Tiny random folders are written in every format that the tests know, with an input and what this
project makes of it. Each PYTHON, of an environment of its own, then reads them with the packages
that are installed there (see `reference_formats.py`). Prints a table of the largest difference,
relative to the largest logit. Of heads that know the token before a position the logits are those
along the greedy path, with what the head adds; of DFlash 2 also the path is compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import mlx.core as mx  # noqa: E402

from dflash_mlx.drafters.block_diffusion import SelectedPath  # noqa: E402
from dflash_mlx.verifier.model import Target  # noqa: E402
from support import reference_dflash2, reference_eagle3  # noqa: E402
from support.drafter_formats import case, speculators  # noqa: E402
from support.drafting import CASES, Blocks, Drafting, Masks, Parallel, Steps  # noqa: E402
from support.families import make_model  # noqa: E402

ANCHOR, TEXT, STEPS = 7, 20, 5
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
ONE = {"layer_types": ["sliding_attention"]}
WINDOWS: dict[str, Any] = {  # longer than a block, as published ones are, or than the text
    "version 2, sliding, 12": (Blocks, case(reference_dflash2.tiny_config(**SLIDING))),
    "version 2, sliding, 12, not causal": (
        Blocks, case(reference_dflash2.tiny_config(**SLIDING, is_causal=False))
    ),
    **{
        f"{name}, sliding, {window}": (
            Blocks, case(speculators(kind, transformer_layer_config={**SLIDING, **size}))
        )
        for name, kind in (("speculators", "dflash"), ("dspark, speculators", "dspark"))
        for window in (12, 64)
        for size in [{"sliding_window": window}]
    },
    **{
        f"eagle3, speculators, sliding, {window}": (
            Steps,
            reference_eagle3.case(reference_eagle3.speculators({**ONE, "sliding_window": window})),
        )
        for window in (12, 64)
    },
}  # fmt: skip


def blocks(subject: Blocks) -> tuple[np.ndarray, list[int]]:
    """Logits [n, V] of a whole block, and the tokens that it drafts."""
    model, rows = subject.model, subject.model.block_size
    state = subject.state(ANCHOR, subject.text(TEXT))
    if model.links is None:
        logits = subject.found(state.context, ANCHOR, rows)
        return logits, logits.argmax(axis=-1).tolist()
    path = list(SelectedPath(model).draft(state, rows).tree.drafted)
    if model.config.selector_rank:
        return subject.found(state.context, ANCHOR, rows), path
    found = model.candidates(state.context, mx.array([ANCHOR]), rows)
    _, scores = found.likeliest()
    ids, logits = np.array(found.tokens), np.array(scores)
    whole = np.full((len(path), model.config.vocab_size), -np.inf, np.float32)
    np.put_along_axis(whole, ids, logits, axis=-1)
    return whole, path


def steps(subject: Any) -> tuple[np.ndarray, list[int]]:
    """Logits [n, V] behind the anchor and each token of some path, and that path."""
    rows = subject.model.block_size - 1 if isinstance(subject, Parallel) else STEPS
    path = subject.path(ANCHOR, rows, ())[1:]
    return subject.found(subject.context(subject.text(TEXT)), ANCHOR, rows), path


def write(place: Path) -> dict[str, dict[str, Any]]:
    """A folder of every format, with its input and our logits; what the references are told."""
    target, told = Target(make_model("llama"), 512, "llama"), {}
    for i, (name, (kind, (raw, tensors))) in enumerate({**CASES, **WINDOWS}.items()):
        if kind is Masks:
            continue
        subject: Drafting = kind(place / str(i), raw, tensors, target)
        logits, path = blocks(subject) if isinstance(subject, Blocks) else steps(subject)
        tokens, features = subject.text(TEXT)
        known = np.isfinite(logits[0])  # of a draft vocabulary
        np.savez(
            place / str(i) / "case.npz",
            features=features, embedding=subject.tables[0], head=subject.tables[1],
            logits=logits[:, known], ids=np.flatnonzero(known),
        )  # fmt: skip
        asked = {"folder": str(place / str(i)), "tokens": tokens, "anchor": ANCHOR, "path": path}
        told[name] = {
            **asked,
            "from_anchor": getattr(subject.model.config, "sample_from_anchor", 0),
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", nargs="+", help="of an environment with published packages")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        cases = write(Path(place))
        found: dict[str, list[str]] = {name: [] for name in cases}
        for python in asked.python:
            command = [python, str(ROOT / "scripts" / "reference_formats.py")]
            done = subprocess.run(
                command, input=json.dumps(cases), stdout=subprocess.PIPE, text=True, check=True
            )
            for line in filter(lambda line: line.startswith("{"), done.stdout.splitlines()):
                result = json.loads(line)
                found[result["name"]].append(f"{result['by']}: {result['said']}")
    print("| format | relative difference of the logits, by package |\n| --- | --- |")
    for name, results in found.items():
        print(f"| {name} | {'; '.join(results) or 'no module'} |")


if __name__ == "__main__":
    main()
