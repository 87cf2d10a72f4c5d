"""The trained rows of the papers' tables: what `dflash_mlx.train` is told for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any
from unittest import mock

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_text
from dflash_mlx.train.__main__ import main as train
from dflash_mlx.train.blocks import SAMPLERS, BlockSampler

FINISHED = "finished"


@dataclass(frozen=True)
class Variant:
    """A draft model that a table trains."""

    words: str  # of the command line; {init} is the pair's own draft model
    law: Mapping[str, Any] = field(default_factory=dict)  # of its blocks, where no option tells it
    read_in: int | None = None  # blocks of this size, though it was trained in others


_DFLASH = "--mode dflash --short-share 0"
_USUAL = f"{_DFLASH} --taps 5 --layers 3 --block-size 8"
_SECOND = "--mode variable-prefix --short-share 0 --init {init}"
VARIANTS = {
    "taps-5": Variant(_USUAL),  # the others' middle
    # A block diffusion model that reads the text by itself
    "no-features": Variant(
        "--mode specdiff --short-share 0 --reveal-share 0 --layers 3 --block-size 8"
    ),
    "taps-1": Variant(f"{_DFLASH} --taps 1 --layers 3 --block-size 8"),
    "taps-3": Variant(f"{_DFLASH} --taps 3 --layers 3 --block-size 8"),
    **{
        f"layers-{n}": Variant(f"{_DFLASH} --taps 5 --layers {n} --block-size 8") for n in (1, 5, 8)
    },
    "block-16": Variant(f"{_DFLASH} --taps 5 --layers 3 --block-size 16"),
    "block-8-as-16": Variant(_USUAL, read_in=16),
    "decay": Variant(f"{_USUAL} --loss decay --tau 4 --soft 0"),
    "uniform": Variant(f"{_USUAL} --loss decay --tau 1e9 --soft 0"),
    "eagle3": Variant("--mode eagle3 --short-share 0 --block-size 8"),
    "mtp": Variant("--mode mtp --short-share 0 --block-size 8"),
    **{f"first-{n}": Variant(f"{_DFLASH} --init {{init}} --block-size {n}") for n in (16, 24, 32)},
    "second-none": Variant(f"{_DFLASH} --init {{init}}"),
    "second-random": Variant(f"{_SECOND} --prefix-base 1e-9", law={"reveal_share": 1.0}),
    "second-prefixes": Variant(_SECOND),
    "second-recipe": Variant("--recipe d2sd --init {init}"),
    **{f"second-{n}": Variant(f"{_SECOND} --block-size {n}") for n in (16, 24, 32)},
}


def trained(name: str, place: Path, words: list[str], init: str | None) -> Path:
    """The folder of a variant, trained there unless it is finished; what was begun goes on.

    words: of every training, what ends it included. init: see `Variant.words`; DFlashError where a
    pair has none.
    """
    variant = VARIANTS[name]
    if variant.read_in is not None:
        like = next(n for n, v in VARIANTS.items() if v.words == variant.words and not v.read_in)
        return _read_in(trained(like, place, words, init), place / name, variant.read_in)
    folder = place / name
    if init is None and "{init}" in variant.words:
        raise DFlashError("the pair has no draft model to start from", "name one with --drafter")
    if not (folder / FINISHED).exists():
        own = variant.words.format(init=init).split()
        laws = {law: partial(BlockSampler, **variant.law) for law in SAMPLERS if variant.law}
        with mock.patch.dict(SAMPLERS, laws):
            train([*own, "--out", str(folder), *words])
        replace_text(folder / FINISHED, "")
        rmtree(folder / "state", ignore_errors=True)
    return folder


def _read_in(source: Path, folder: Path, size: int) -> Path:
    """A copy that says that its blocks are of another size."""
    folder.mkdir(exist_ok=True)
    for file in (*source.glob("*.safetensors"), source / "history.jsonl"):
        copyfile(file, folder / file.name)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    replace_text(folder / "config.json", json.dumps({**raw, "block_size": size}, indent=1))
    return folder
