"""Targets: mlx-lm's own loading, casting, quantisation and recipes, with nothing evaluated."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_mlx.convert.conversion import Conversion, describe_numbers, largest
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import Part
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.models.source import BESIDE, LICENCES

GROUP_SIZE = 64  # mlx-lm's for affine
BYTES_PER_TOKEN = 100  # of a tokenizer.json, about

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")
_REPLACED = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
Opened = tuple[Any, dict[str, Any], Callable[[Path], None], int]


def plan_target(part: Part, settings: ConvertConfig) -> Conversion:
    """A target's conversion; DFlashError for what mlx-lm does not know or cannot do."""
    model, config, write_beside, rest = (
        _open_gguf(part, settings.dtype) if part.facts is None else _open_folder(part)
    )
    if settings.quantizes and "quantization" in config and not settings.dequantize:
        raise DFlashError(
            f"{part.name} is already quantised to {config['quantization'].get('bits')} bits",
            "add --dequantize to quantise it anew, or leave the bits as they are",
        )
    before = largest(_parameters(model))
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
    weights = _parameters(model)
    return Conversion(
        name=part.name,
        description=f"{config.get('model_type')} {describe_numbers(config, weights)}",
        weights=weights,
        config=config,
        largest=before + largest(weights),
        write_beside=write_beside,
        held=part.path.stat().st_size if part.facts is None else 0,
        rest=rest,
    )


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
    if name not in ("float16", "bfloat16", "float32"):
        return config
    dtype = getattr(mx, name)
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast_one(path: str, array: mx.array) -> mx.array:
        is_cast = may_cast(path) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if is_cast else array

    model.update(tree_map_with_path(cast_one, model.parameters()))
    return {**config, "torch_dtype": name}


def _open_folder(part: Part) -> Opened:
    from mlx_lm.utils import load_model, load_tokenizer

    folder = part.path
    if not any(fnmatch(file, pattern) for file in part.files for pattern in _TOKENIZERS):
        raise DFlashError(
            f"{part.name} cannot be loaded, it has no tokenizer ({', '.join(_TOKENIZERS)})",
            "choose a complete model folder",
        )
    try:
        model, config = load_model(folder, lazy=True)
        if part.has_weights:
            load_tokenizer(folder, {"trust_remote_code": False}, config.get("eos_token_id"))
    except Exception as error:  # of three libraries, one of which raises plain ones
        raise DFlashError(
            f"{part.name} cannot be loaded ({in_one_line(error)})",
            "choose a complete model folder of a family that mlx-lm supports",
        ) from None
    copied = {
        name: size
        for name, size in part.files.items()
        if name not in _REPLACED and any(fnmatch(name, pattern) for pattern in (*BESIDE, *LICENCES))
    }

    def write_beside(destination: Path) -> None:
        for name in copied:
            shutil.copyfile(folder / name, destination / name)

    return model, config, write_beside, sum(copied.values())


def _open_gguf(part: Part, dtype: str | None) -> Opened:
    from dflash_mlx.models.formats.gguf_target import build_model, build_tokenizer, read_file

    tensors, metadata = read_file(part.path)
    floating = None if dtype is None else getattr(mx, dtype)
    model, config = build_model(part.path, tensors, metadata, floating)
    if packing := _packing(model):
        config["quantization"] = packing
    write = build_tokenizer(part.path, metadata).save_pretrained
    # Vocabulary and merges take about as much in a tokenizer.json as in the file.
    return model, config, write, BYTES_PER_TOKEN * config["vocab_size"]


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


def _parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))
