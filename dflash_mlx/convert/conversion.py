"""A model on its way from a source to a folder.

Targets go through `mlx_lm.convert`, under our checks; drafters through their family's file format.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.core.option import check_values, option
from dflash_mlx.drafters.formats import DrafterFolder
from dflash_mlx.drafters.networks.files import parameters_of
from dflash_mlx.models.check import ModelFacts
from dflash_mlx.models.downloads import stored_bytes
from dflash_mlx.models.gguf_target import load_gguf
from dflash_mlx.models.names import TARGET
from dflash_mlx.models.read import LIKELY_TOKENS
from dflash_mlx.models.source import BESIDE, CONFIG, DRAFTER, FLOATS, LICENCES, quantisation
from dflash_mlx.verifier.reading import loading

RUNTIME = 450_000_000  # bytes that Python, MLX and the tokenizer take themselves
GROUP_SIZE = 64  # mlx-lm's for affine
DTYPES = ("float16", "bfloat16", "float32")

_MODE_BITS = {"affine": 4, "mxfp4": 4, "nvfp4": 4, "mxfp8": 8}  # where none are asked for
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
        "weights that share a scale, in target and drafter (default: the mode's own)",
        type=int,
        choices=(16, 32, 64, 128),
    )
    mode: str = option(
        "affine", "how a target is quantised", choices=("affine", "mxfp4", "nvfp4", "mxfp8")
    )
    recipe: str | None = option(
        None,
        "quantise a target with more bits where they matter",
        choices=("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"),
    )
    dtype: str | None = option(
        None, "data type of the other weights (default: as the checkpoint says)", choices=DTYPES
    )
    dequantize: bool = option(
        False,
        "undo a target's quantisation; with --bits, then quantise it again",
        action="store_true",
    )
    mtp: bool = option(
        False,
        "extract only a target's head for multi-token prediction, for use with --drafter",
        action="store_true",
    )
    drafter_bits: int | None = option(
        None, "with --pair: quantise the drafters to 4 or 8 bits", type=int, choices=(4, 8)
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.recipe is not None and (self.mode != "affine" or self.bits is not None):
            what = f"the recipe {self.recipe} sets bits and mode itself"
            raise DFlashError(what, "leave --bits and --mode out")
        if self.group_size is not None and not self.quantizes and self.drafter_bits is None:
            what = f"group_size is {self.group_size}, but nothing is quantised"
            raise DFlashError(what, "add --bits", "group_size")

    @property
    def quantizes(self) -> bool:
        """Whether the target, or a drafter that is converted alone, is quantised."""
        return self.bits is not None or self.recipe is not None or self.mode != "affine"


def kind_of(facts: ModelFacts) -> str:
    """TARGET or DRAFTER."""
    return TARGET if facts.format is None else DRAFTER


@dataclass(frozen=True)
class Conversion:
    """What is to be written of one model."""

    facts: ModelFacts
    description: str
    size: int  # bytes that it takes on the disk, of a target about
    memory: int  # bytes that converting takes at most, about
    write: Callable[[Path], None]  # makes this folder, which is not there yet

    def write_to(self, folder: Path) -> None:
        try:
            with redirect_stdout(sys.stderr):
                self.write(folder)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            step = "choose other bits, another group size, mode or recipe"
            if isinstance(error, RuntimeError):  # MLX's own, of files that it cannot read or write
                step = "check the disks of SRC and DST, then convert again"
            what = f"{self.facts.name} cannot be converted like this ({in_one_line(error)})"
            raise DFlashError(what, f"{step}; nothing was left behind") from None


def plan_drafter(facts: ModelFacts, settings: ConvertConfig, paired: bool) -> Conversion:
    """A drafter's conversion; DFlashError for one that cannot be read or converted so.

    paired: whether it is converted with its target, which settings like `bits` are for then.
    """
    bits = settings.drafter_bits if paired else settings.bits
    assert facts.format is not None and facts.source is not None
    if not paired and (settings.recipe or settings.mode != "affine" or settings.dequantize):
        what = "--mode, --recipe and --dequantize are for targets, but SRC is a drafter"
        raise DFlashError(what, "leave them out")
    if bits is not None and facts.weights.quantisation:
        what = f"{facts.name} is already quantised to {facts.weights.quantisation}"
        raise DFlashError(what, "leave the bits out, or convert the drafter that it was made from")
    dtype = None if settings.dtype is None else getattr(mx, settings.dtype)
    form = dtype, bits, settings.group_size
    folder = facts.source.folder
    drafter = described(facts) if folder is None else facts.format.read_drafter(folder)
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
        if (likely := facts.path / LIKELY_TOKENS).is_file():
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
    """A target's conversion; DFlashError for one that has no tokenizer or is quantised already."""
    from mlx_lm.utils import load_tokenizer

    config = facts.config
    files = {} if facts.source is None else facts.source.files
    if files and not any(fnmatch(file, kind) for file in files for kind in _TOKENIZERS):
        what = f"{facts.name} cannot be loaded, it has no tokenizer ({', '.join(_TOKENIZERS)})"
        raise DFlashError(what, "choose a complete model folder")
    if files and facts.is_here:
        with loading(facts.name):
            load_tokenizer(facts.path, {"trust_remote_code": False}, config.get("eos_token_id"))
    stored, _ = quantisation(config)
    if settings.quantizes and stored and not settings.dequantize:
        step = "add --dequantize to quantise it again, or leave the bits as they are"
        raise DFlashError(f"{facts.name} is already quantised to {stored}", step)
    read = facts.path.stat().st_size if facts.source is None else facts.weights.stored_bytes
    size = _target_size(facts.weights.parameters, settings, read)
    words = [str(config.get("model_type", "")), settings.recipe or ""]
    if settings.quantizes and settings.recipe is None:
        bits = settings.bits or _MODE_BITS[settings.mode]
        words.append(f"in {bits} bits" + f", {settings.mode}" * (settings.mode != "affine"))
    elif settings.recipe is None and (numbers := settings.dtype or stored or facts.weights.dtype):
        words.append(f"in {numbers}")

    def write(folder: Path) -> None:
        with TemporaryDirectory(prefix=".", dir=folder.parent) as scratch:
            _write_target(facts, settings, folder, Path(scratch))
        for name in files:
            kept = any(fnmatch(name, pattern) for pattern in (*BESIDE, *LICENCES))
            if kept and name not in _REPLACED:
                shutil.copyfile(facts.path / name, folder / name)
        if settings.dtype is not None:  # in place of the checkpoint's own
            changed = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            text = json.dumps({**changed, "torch_dtype": settings.dtype}, indent=4)
            (folder / CONFIG).write_text(text, encoding="utf-8")

    return Conversion(facts, " ".join(filter(None, words)), size, RUNTIME + read + size, write)


def _target_size(parameters: int, settings: ConvertConfig, read: int) -> int:
    if settings.quantizes:  # recipes have at most 6 bits
        bits = 6 if settings.recipe else settings.bits or _MODE_BITS[settings.mode]
        return stored_bytes(parameters, bits) or read
    if settings.dequantize or settings.dtype is not None:
        return parameters * (4 if settings.dtype == "float32" else 2) or read
    return read


def _write_target(facts: ModelFacts, settings: ConvertConfig, folder: Path, scratch: Path) -> None:
    """By `mlx_lm.convert`; a GGUF file becomes a folder first, packed numbers plain ones."""
    source = facts.path
    if facts.source is None:
        source = _unpacked(source, settings.dtype, scratch / "gguf")
    options: dict[str, Any] = {"dtype": settings.dtype}
    if settings.dequantize and settings.quantizes:
        _mlx_lm_convert(source, scratch / "plain", {**options, "dequantize": True})
        source = scratch / "plain"
    elif settings.dequantize:
        options["dequantize"] = True
    if settings.quantizes:
        group_size = settings.group_size or (GROUP_SIZE if settings.recipe else None)
        options |= {"quantize": True, "q_bits": settings.bits, "q_mode": settings.mode}
        options |= {"q_group_size": group_size, "quant_predicate": settings.recipe}
    _mlx_lm_convert(source, folder, options)


def _mlx_lm_convert(source: Path, folder: Path, options: Mapping[str, Any]) -> None:
    from mlx_lm.convert import convert

    convert(str(source), str(folder), **options)


def _unpacked(file: Path, dtype: str | None, folder: Path) -> Path:
    from mlx_lm.utils import save

    model, tokenizer, config = load_gguf(file, None if dtype is None else getattr(mx, dtype))
    if packing := _packing(model):
        config["quantization"] = packing
    save(folder, file, model, tokenizer, config)
    return folder


def _packing(model: Any) -> dict[str, Any]:
    """The packed layers as mlx-lm's config.json has them: one choice for most, and the others."""
    packed = {
        name: {"group_size": module.group_size, "bits": module.bits, "mode": "affine"}
        for name, module in model.named_modules()
        if hasattr(module, "bits")
    }
    choices = list(packed.values())
    usual: dict[str, Any] = max(choices, key=choices.count, default={})
    return {**usual, **{name: choice for name, choice in packed.items() if choice != usual}}
