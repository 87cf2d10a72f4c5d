"""A model on its way from a source to a folder.

Targets go through `mlx_lm.convert`, under our checks; drafters through their family's file format.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.option import check_values, option
from dflash_mlx.drafters.formats import DrafterFolder
from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.models.check import ModelFacts
from dflash_mlx.models.downloads import stored_bytes
from dflash_mlx.models.read import LIKELY_TOKENS
from dflash_mlx.models.source import BESIDE, CONFIG, FLOATS, LICENCES, quantisation
from dflash_mlx.verifier.reading import loading

RUNTIME = 450_000_000  # bytes that Python, MLX and the tokenizer take themselves
DTYPES = ("float16", "bfloat16", "float32")

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")
_REPLACED = (CONFIG, "hf_quant_config.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class ConvertConfig:
    """What becomes of the weights; without any setting they keep their numbers."""

    bits: int | None = option(
        None,
        "quantise the matrices to this many bits, a drafter's to 4 or 8",
        type=int,
        choices=(2, 3, 4, 5, 6, 8),
    )
    group_size: int | None = option(
        None,
        "weights that share a scale (default: 64; a drafter's 32 where its rows need that)",
        type=int,
        choices=(16, 32, 64, 128),
    )
    dtype: str | None = option(
        None, "data type of the other weights (default: as the checkpoint says)", choices=DTYPES
    )
    mtp: bool = option(
        False,
        "extract only a target's head for multi-token prediction, for use with --drafter",
        action="store_true",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.group_size is not None and self.bits is None:
            what = f"group_size is {self.group_size}, but nothing is quantised"
            raise DFlashError(what, "add --bits", "group_size")


@dataclass(frozen=True)
class Conversion:
    """What is to be written of one model."""

    facts: ModelFacts
    description: str
    size: int  # bytes that it takes on the disk, of a target about
    memory: int  # bytes that converting takes at most, about
    write: Callable[[Path], None]  # makes this folder, which is not there yet

    @cached_property
    def download(self) -> int:
        """Bytes that are not here yet."""
        return 0 if self.facts.source is None else self.facts.source.missing()

    def write_to(self, folder: Path) -> None:
        try:
            with redirect_stdout(sys.stderr):
                self.write(folder)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            step = "choose other bits or another group size"
            if isinstance(error, RuntimeError):  # MLX's own, of files that it cannot read or write
                step = "check the disks of SRC and DST, then convert again"
            what = f"{self.facts.name} cannot be converted like this ({in_one_line(error)})"
            raise DFlashError(what, f"{step}; nothing was left behind") from None


def plan(facts: ModelFacts, settings: ConvertConfig) -> Conversion:
    """A model's conversion; DFlashError for one that cannot be read or converted so."""
    return (plan_target if facts.format is None else plan_drafter)(facts, settings)


def plan_drafter(facts: ModelFacts, settings: ConvertConfig) -> Conversion:
    """A drafter's conversion."""
    source, bits = facts.source, settings.bits
    assert facts.format is not None and source is not None
    if bits is not None and facts.weights.quantisation:
        what = f"{facts.name} is already quantised to {facts.weights.quantisation}"
        raise DFlashError(what, "leave the bits out, or convert the drafter that it was made from")
    dtype = None if settings.dtype is None else getattr(mx, settings.dtype)
    form = dtype, bits, settings.group_size
    here = source.folder
    drafter = described(facts) if here is None else facts.format.read_drafter(here)
    weights, config = drafter.converted(*form)
    floating = (a.dtype for a in weights.values() if mx.issubdtype(a.dtype, mx.floating))
    config["dtype"] = str(next(floating)).removeprefix("mlx.core.")
    words, _ = quantisation(config)
    numbers = f"in {words}, else in {config['dtype']}" if words else f"in {config['dtype']}"
    description = f"{config['architectures'][0]} {numbers}, blocks of {facts.config.block_size}"
    size = sum(array.nbytes for array in weights.values())

    def write(folder: Path) -> None:
        from mlx_lm.utils import save_config

        folder.mkdir()
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        save_config(dict(config), folder / CONFIG)
        if (likely := source.here / LIKELY_TOKENS).is_file():
            shutil.copyfile(likely, folder / likely.name)

    return Conversion(facts, description, size, RUNTIME + 2 * size, write)


def described(facts: ModelFacts) -> DrafterFolder:
    """A drafter on the hub as its config and heads tell it, with other numbers for its weights."""
    assert facts.format is not None and facts.source is not None
    heads = facts.weights.tensors
    stored = {ours: heads[name].dtype for name, ours in facts.format.our_names(heads).items()}
    tensors = parameters_of(facts.format.build(facts.config, facts.name))
    for name, array in tensors.items():
        if mx.issubdtype(array.dtype, mx.floating):
            kind = FLOATS.get(stored.get(name, ""), facts.weights.dtype)
            tensors[name] = array.astype(getattr(mx, kind))
    raw = facts.format.told(facts.source.read_json(CONFIG), heads)
    return DrafterFolder(facts.format, facts.config, tensors, raw)


def plan_target(facts: ModelFacts, settings: ConvertConfig) -> Conversion:
    """A target's conversion by mlx-lm; DFlashError without a tokenizer, or for packed weights."""
    from mlx_lm.utils import load_tokenizer

    source, config = facts.source, facts.config
    assert source is not None
    if not any(fnmatch(file, kind) for file in source.files for kind in _TOKENIZERS):
        what = f"{facts.name} cannot be loaded, it has no tokenizer ({', '.join(_TOKENIZERS)})"
        raise DFlashError(what, "choose a complete model folder")
    if source.folder is not None:
        with loading(facts.name):
            load_tokenizer(source.folder, {"trust_remote_code": False}, config.get("eos_token_id"))
    stored, _ = quantisation(config)
    if settings.bits is not None and stored:
        step = "leave the bits out, or undo that first with mlx_lm.convert --dequantize"
        raise DFlashError(f"{facts.name} is already quantised to {stored}", step)
    read, size = facts.weights.stored_bytes, facts.weights.stored_bytes
    if settings.bits is not None:
        size = stored_bytes(facts.weights.parameters, settings.bits)
    elif settings.dtype is not None and not stored:
        size = facts.weights.parameters * (4 if settings.dtype == "float32" else 2)
    numbers = settings.dtype or stored or facts.weights.dtype
    numbers = numbers if settings.bits is None else f"{settings.bits} bits"

    def write(folder: Path) -> None:
        from mlx_lm.convert import convert

        convert(
            str(source.here),
            str(folder),
            quantize=settings.bits is not None,
            q_bits=settings.bits,
            q_group_size=settings.group_size,
            dtype=settings.dtype,
        )
        for name in source.files:
            kept = any(fnmatch(name, pattern) for pattern in (*BESIDE, *LICENCES))
            if kept and name not in _REPLACED:
                shutil.copyfile(source.here / name, folder / name)

    description = f"{config.get('model_type', '')} in {numbers}"
    return Conversion(facts, description, size, RUNTIME + read + size, write)
