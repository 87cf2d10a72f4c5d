"""A model on its way from a source to a folder: cast, quantised and named, nothing evaluated yet.

Targets go through mlx-lm's own loading, casting, quantisation and recipes, drafters through their
family's file format.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_mlx.core.config import option
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.models.check import ModelFacts, loading
from dflash_mlx.models.pair_folder import DRAFTER, TARGET
from dflash_mlx.models.source import BESIDE, LICENCES
from dflash_mlx.models.tokens import LIKELY_TOKENS
from dflash_mlx.models.weight_files import quantisation
from dflash_mlx.system.safetensors_header import TensorHeader

RUNTIME = 450_000_000  # bytes that Python, MLX and the tokenizer take themselves
GROUP_SIZE = 64  # mlx-lm's for affine
BYTES_PER_TOKEN = 100  # of a tokenizer.json, about
DTYPES = ("float16", "bfloat16", "float32")

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")
_REPLACED = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
Opened = tuple[Any, dict[str, Any], Callable[[Path], None], int]


@dataclass(frozen=True)
class ConvertConfig:
    """What becomes of the weights; without any setting they keep their numbers."""

    bits: int | None = option(
        None,
        "quantise the matrices to so many bits, a drafter's to 4 or 8",
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
        None, "of what is not quantised (default: as the checkpoint says)", choices=DTYPES
    )
    dequantize: bool = option(
        False, "undo a target's quantisation, before another one if asked for", action="store_true"
    )
    drafter_bits: int | None = option(
        None, "with --pair: quantise the drafters so", type=int, choices=(4, 8)
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            value, choices = getattr(self, field.name), field.metadata["argparse"].get("choices")
            if choices is not None and value not in (field.default, *choices):
                shown = ", ".join(map(str, choices))
                raise DFlashError(
                    f"{field.name} is {value!r}", f"choose one of {shown}", field.name
                )
        if self.recipe is not None and (self.mode != "affine" or self.bits is not None):
            raise DFlashError(
                f"the recipe {self.recipe} sets bits and mode itself", "leave --bits and --mode out"
            )
        if self.group_size is not None and not self.quantizes and self.drafter_bits is None:
            raise DFlashError(
                f"group_size is {self.group_size}, but nothing is quantised",
                "add --bits",
                "group_size",
            )

    @property
    def quantizes(self) -> bool:
        """Whether the target, or a drafter that is converted alone, is quantised."""
        return self.bits is not None or self.recipe is not None or self.mode != "affine"


@dataclass(frozen=True)
class Part:
    """A model to be converted, found and checked.

    path: its folder, or its GGUF file, whose facts are few before it is read. has_weights: False
    where only headers are here, and in the folder nothing is behind them. download: bytes still to
    be fetched.
    """

    name: str
    path: Path
    facts: ModelFacts
    has_weights: bool = True
    download: int = 0

    @property
    def kind(self) -> str:
        """TARGET or DRAFTER."""
        return TARGET if self.facts.format is None else DRAFTER


@dataclass
class Conversion:
    """What is to be written: lazy arrays by name, and what lies beside them.

    weights: evaluated one at a time; emptied when written. config: as in its config.json. memory:
    bytes that converting takes at most, about. write_beside: puts the tokenizer into a folder,
    about `rest` bytes.
    """

    part: Part
    description: str
    weights: dict[str, mx.array]
    config: dict[str, Any]
    memory: int
    write_beside: Callable[[Path], None] = lambda _: None
    rest: int = 0

    def write_rest(self, folder: Path) -> None:
        """Write all but the weights."""
        from mlx_lm.utils import save_config

        self.write_beside(folder)
        keep = {"keep_vision_config": True} if "vision_config" in self.config else {}
        save_config(dict(self.config), folder / "config.json", **keep)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are still to be written."""
        return sum(array.nbytes for array in self.weights.values())


def plan_drafter(part: Part, settings: ConvertConfig, paired: bool) -> Conversion:
    """A drafter's conversion; DFlashError for one that cannot be read or converted so.

    paired: whether it is converted with its target, which settings like `bits` are for then.
    """
    facts, bits = part.facts, settings.drafter_bits if paired else settings.bits
    assert facts.format is not None
    if not paired and (settings.recipe or settings.mode != "affine" or settings.dequantize):
        raise DFlashError(
            "--mode, --recipe and --dequantize are for targets, but SRC is a drafter",
            "leave them out",
        )
    if bits is not None and facts.weights.quantisation:
        raise DFlashError(
            f"{part.name} is already quantised to {facts.weights.quantisation}",
            "leave the bits out, or convert the drafter that it was made from",
        )
    dtype = None if settings.dtype is None else getattr(mx, settings.dtype)
    form = dtype, bits, settings.group_size
    weights, config = facts.format.read_drafter(part.path, part.has_weights).converted(*form)
    numbers = _describe_numbers(config, weights)
    description = f"{config['architectures'][0]} {numbers}, blocks of {facts.config.block_size}"
    config["dtype"] = numbers.rpartition(" ")[2]
    memory = RUNTIME + _largest(facts.weights.tensors) + _largest(weights)
    beside = [file for file in (part.path / LIKELY_TOKENS,) if file.is_file()]

    def write_beside(destination: Path) -> None:
        for file in beside:
            shutil.copyfile(file, destination / file.name)

    rest = sum(file.stat().st_size for file in beside)
    return Conversion(part, description, weights, config, memory, write_beside, rest)


def plan_target(part: Part, settings: ConvertConfig) -> Conversion:
    """A target's conversion; DFlashError for what mlx-lm does not know or cannot do."""
    source = part.facts.source
    model, config, write_beside, rest = (
        _open_gguf(part, settings.dtype) if source is None else _open_folder(part, source.files)
    )
    if settings.quantizes and "quantization" in config and not settings.dequantize:
        raise DFlashError(
            f"{part.name} is already quantised to {config['quantization'].get('bits')} bits",
            "add --dequantize to quantise it anew, or leave the bits as they are",
        )
    memory = RUNTIME + _largest(dict(tree_flatten(model.parameters())))
    try:
        with redirect_stdout(sys.stderr):
            model, config = transform(model, config, settings)
    except (ValueError, TypeError, KeyError) as error:
        raise DFlashError(
            f"{part.name} cannot be converted so ({in_one_line(error)})",
            "choose other bits, another group size, mode or recipe",
        ) from None
    if "vision_tower" not in getattr(model, "model", {}):
        config.pop("vision_config", None)
    weights = dict(tree_flatten(model.parameters()))
    description = f"{config.get('model_type')} {_describe_numbers(config, weights)}"
    memory += _largest(weights)
    if source is None:  # a GGUF file is in memory all the time
        memory += part.path.stat().st_size
    return Conversion(part, description, weights, config, memory, write_beside, rest)


def transform(model: Any, config: dict[str, Any], settings: ConvertConfig) -> tuple[Any, Any]:
    """What mlx_lm.convert does between loading and saving, in its order, by its functions."""
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import dequantize_model, quantize_model

    config = _cast(model, dict(config), settings.dtype)
    if settings.dequantize:
        config.pop("quantization", None)
        config.pop("quantization_config", None)
        model = dequantize_model(model)
    if settings.quantizes:
        group_size, recipe = settings.group_size, cast(Any, None)
        if settings.recipe is not None:
            group_size = group_size or GROUP_SIZE
            recipe = mixed_quant_predicate_builder(settings.recipe, model, group_size)
        model, config = quantize_model(
            model, config, group_size, settings.bits, mode=settings.mode, quant_predicate=recipe
        )
    return model, config


def _cast(model: Any, config: dict[str, Any], wanted: str | None) -> dict[str, Any]:
    """Cast to `wanted`, or else to what the config says, as mlx_lm.convert does."""
    name = wanted or config.get("torch_dtype") or config.get("text_config", {}).get("dtype")
    if name not in DTYPES:
        return config
    dtype = getattr(mx, name)
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast_one(path: str, array: mx.array) -> mx.array:
        is_cast = may_cast(path) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if is_cast else array

    model.update(tree_map_with_path(cast_one, model.parameters()))
    return {**config, "torch_dtype": name}


def _open_folder(part: Part, files: Mapping[str, int]) -> Opened:
    from mlx_lm.utils import load_model, load_tokenizer

    folder = part.path
    if not any(fnmatch(file, pattern) for file in files for pattern in _TOKENIZERS):
        raise DFlashError(
            f"{part.name} cannot be loaded, it has no tokenizer ({', '.join(_TOKENIZERS)})",
            "choose a complete model folder",
        )
    with loading(part.name):
        model, config = load_model(folder, lazy=True)
        if part.has_weights:
            load_tokenizer(folder, {"trust_remote_code": False}, config.get("eos_token_id"))
    copied = [
        name
        for name in files
        if name not in _REPLACED and any(fnmatch(name, pattern) for pattern in (*BESIDE, *LICENCES))
    ]

    def write_beside(destination: Path) -> None:
        for name in copied:
            shutil.copyfile(folder / name, destination / name)

    return model, config, write_beside, sum(files[name] for name in copied)


def _open_gguf(part: Part, dtype: str | None) -> Opened:
    from dflash_mlx.models.formats.gguf_target import open_gguf

    floating = None if dtype is None else getattr(mx, dtype)
    model, tokenizer, config = open_gguf(part.path, floating)
    if packing := _packing(model):
        config["quantization"] = packing
    # Vocabulary and merges take about as much in a tokenizer.json as in the file.
    return model, config, tokenizer.save_pretrained, BYTES_PER_TOKEN * config["vocab_size"]


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


def _describe_numbers(config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    """How weights are stored, in words that end with the dtype of what is not packed."""
    kinds = Counter[mx.Dtype]()
    for array in weights.values():
        if mx.issubdtype(array.dtype, mx.floating):
            kinds[array.dtype] += array.nbytes
    dtype = str(kinds.most_common(1)[0][0]).removeprefix("mlx.core.")
    words, _ = quantisation(config)
    mixed = any(isinstance(choice, dict) for choice in config.get("quantization", {}).values())
    return f"in {words}{' and others' * mixed}, else in {dtype}" if words else f"in {dtype}"


def _largest(tensors: Mapping[str, mx.array] | Mapping[str, TensorHeader]) -> int:
    return max(tensor.nbytes for tensor in tensors.values())
