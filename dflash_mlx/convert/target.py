"""Targets: mlx-lm's own loading, casting, quantisation and recipes, with nothing evaluated."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_mlx.convert.conversion import TARGET, Conversion, describe_numbers
from dflash_mlx.convert.gguf_head import read_head
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import Source
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.models.source import BESIDE

GROUP_SIZE = 64  # mlx-lm's for affine
BYTES_PER_TOKEN = 100  # of a tokenizer.json, about

_BESIDE = (*BESIDE, "LICENSE*", "NOTICE*")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")
_REPLACED = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
Opened = tuple[Any, dict[str, Any], Callable[[Path], None], int]


def plan_target(source: Source, settings: ConvertConfig) -> Conversion:
    """A target's conversion; DFlashError for what mlx-lm does not know or cannot do."""
    model, config, write_beside, beside = (
        _open_gguf(source, settings.dtype) if source.is_gguf else _open_folder(source)
    )
    if settings.quantizes and "quantization" in config and not settings.dequantize:
        raise DFlashError(
            f"{source.name} is already quantised to {config['quantization'].get('bits')} bits",
            "add --dequantize to quantise it anew, or leave the bits as they are",
        )
    before = _largest(model)
    try:
        with redirect_stdout(sys.stderr):
            model, config = transform(model, config, settings)
    except (ValueError, TypeError, KeyError) as error:
        raise DFlashError(
            f"{source.name} cannot be converted so ({in_one_line(error)})",
            "choose other bits, another group size, mode or recipe",
        ) from None

    def write_rest(folder: Path) -> None:
        write_beside(folder)
        _write_config(folder / "config.json", config, model_keeps_vision)

    model_keeps_vision = "vision_tower" in getattr(model, "model", {})
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return Conversion(
        kind=TARGET,
        name=source.name,
        description=f"{config.get('model_type')} {describe_numbers(config, weights)}",
        weights=weights,
        config=config,
        write_rest=write_rest,
        largest=before + _largest(model),
        held=source.path.stat().st_size if source.is_gguf else 0,
        rest=beside,
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
        return (
            array.astype(dtype)
            if may_cast(path) and mx.issubdtype(array.dtype, mx.floating)
            else array
        )

    model.update(tree_map_with_path(cast_one, model.parameters()))
    return {**config, "torch_dtype": name}


def _open_folder(source: Source) -> Opened:
    from mlx_lm.utils import load_model, load_tokenizer

    folder = source.path
    if not any(fnmatch(file, pattern) for file in source.files.files for pattern in _TOKENIZERS):
        raise DFlashError(
            f"{source.name} cannot be loaded, it has no tokenizer ({', '.join(_TOKENIZERS)})",
            "choose a complete model folder",
        )
    try:
        model, config = load_model(folder, lazy=True)
        if not source.heads_only:
            load_tokenizer(folder, {"trust_remote_code": False}, config.get("eos_token_id"))
    except Exception as error:  # of three libraries, one of which raises plain ones
        raise DFlashError(
            f"{source.name} cannot be loaded ({in_one_line(error)})",
            "choose a complete model folder of a family that mlx-lm supports",
        ) from None
    files = [file for pattern in _BESIDE for file in sorted(folder.glob(pattern))]
    files = [file for file in files if file.is_file() and file.name not in _REPLACED]

    def write_beside(destination: Path) -> None:
        for file in files:
            shutil.copyfile(file, destination / file.name)

    return model, config, write_beside, sum(file.stat().st_size for file in files)


def _open_gguf(source: Source, dtype: str | None) -> Opened:
    from dflash_mlx.models.formats.gguf_target import build_model, build_tokenizer, read_file

    file = source.path
    tensors, metadata = read_head(file) if source.heads_only else read_file(file)
    floating = None if dtype is None else getattr(mx, dtype)
    model, config = build_model(file, tensors, metadata, floating)
    if packing := _packing(model):
        config["quantization"] = packing
    # Vocabulary and merges take about as much in a tokenizer.json as in the file.
    beside = BYTES_PER_TOKEN * config["vocab_size"]
    if source.heads_only:
        return model, config, _write_nothing, beside
    return model, config, build_tokenizer(file, metadata).save_pretrained, beside


def _write_nothing(folder: Path) -> None:
    """Beside a model of which only the heads were read."""


def _packing(model: Any) -> dict[str, Any]:
    """The packed layers as mlx-lm's config.json has them: one choice for most, and the others."""
    packed = {
        name: (module.group_size, module.bits)
        for name, module in model.named_modules()
        if hasattr(module, "bits")
    }
    if not packed:
        return {}
    (usual, _), *_ = Counter(packed.values()).most_common(1)
    unusual = {name: _choice(*each) for name, each in packed.items() if each != usual}
    return {**_choice(*usual), **unusual}


def _choice(group_size: int, bits: int) -> dict[str, Any]:
    return {"group_size": group_size, "bits": bits, "mode": "affine"}


def _largest(model: Any) -> int:
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return max(array.nbytes for array in weights.values())


def _write_config(file: Path, config: dict[str, Any], keep_vision: bool) -> None:
    from mlx_lm.utils import save_config

    keep = {"keep_vision_config": True} if keep_vision else {}
    save_config(dict(config), file, **keep)
