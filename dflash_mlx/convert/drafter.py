"""Drafters: checked and named as our network has them, cast, and quantised if asked for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.convert.conversion import DRAFTER, Conversion, describe_numbers
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import Source
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import DrafterFolder, read_config, read_drafter
from dflash_mlx.drafters.dflash.quantized import quantization_of, quantize_network
from dflash_mlx.drafters.dflash.tensors import (
    DOWNLOAD_AGAIN,
    drafter_files,
    make_network,
    parameters_of,
    plain_names,
)
from dflash_mlx.system.safetensors_header import read_header

_FLOATING = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def plan_drafter(source: Source, settings: ConvertConfig) -> Conversion:
    """A drafter's conversion; DFlashError for one that cannot be read or does not hold together."""
    folder = _read(source)
    network, config = folder.network(), dict(folder.raw)
    before = _largest(parameters_of(network))
    if settings.dtype is not None:
        network.set_dtype(getattr(mx, settings.dtype))
    if settings.bits is not None:
        if folder.config.quantization is not None:
            raise DFlashError(
                f"{source.name} is already quantised to {folder.config.quantization.bits} bits",
                "leave the bits out, or convert the drafter that it was made from",
            )
        quantize_network(network, settings.bits, settings.group_size)
        if (packing := quantization_of(network)) is not None:
            config["quantization"] = asdict(packing)
    weights = parameters_of(network)
    dtype = describe_numbers(config, weights)
    config["dtype"] = dtype.rpartition(" ")[2]

    def write_rest(folder: Path) -> None:
        text = json.dumps(config, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    return Conversion(
        kind=DRAFTER,
        name=source.name,
        description=f"{config['architectures'][0]} {dtype}, blocks of {folder.config.block_size}",
        weights=weights,
        config=config,
        write_rest=write_rest,
        largest=before + _largest(weights),
    )


def _read(source: Source) -> DrafterFolder:
    """The folder; of one that is not fetched, a network of the same sizes and types."""
    if not source.heads_only:
        return read_drafter(source.path)
    config = read_config(source.path)
    raw: dict[str, Any] = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    raw.setdefault("architectures", ["drafter"])
    arrays = parameters_of(make_network(config, source.name))
    for file in drafter_files(source.path):
        tensors = read_header(file, DOWNLOAD_AGAIN)
        for name, plain in plain_names(tensors).items():
            if plain in arrays and (dtype := _FLOATING.get(tensors[name].dtype)) is not None:
                arrays[plain] = arrays[plain].astype(dtype)
    return DrafterFolder(config, arrays, raw)


def _largest(weights: dict[str, mx.array]) -> int:
    return max(array.nbytes for array in weights.values())
