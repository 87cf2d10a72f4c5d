"""Drafters: checked and named as our network has them, cast, and quantised if asked for."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.convert.conversion import Conversion, describe_numbers, largest
from dflash_mlx.convert.settings import ConvertConfig
from dflash_mlx.convert.source import Part
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import read_drafter
from dflash_mlx.drafters.dflash.quantized import quantize_network
from dflash_mlx.drafters.dflash.save import stored_config
from dflash_mlx.drafters.dflash.tensors import parameters_of


def plan_drafter(part: Part, settings: ConvertConfig) -> Conversion:
    """A drafter's conversion; DFlashError for one that cannot be read or does not hold together."""
    folder = read_drafter(part.path, part.has_weights)
    network = folder.network()
    before = largest(parameters_of(network))
    if settings.dtype is not None:
        network.set_dtype(getattr(mx, settings.dtype))
    if settings.bits is not None:
        if folder.config.quantization is not None:
            raise DFlashError(
                f"{part.name} is already quantised to {folder.config.quantization.bits} bits",
                "leave the bits out, or convert the drafter that it was made from",
            )
        quantize_network(network, settings.bits, settings.group_size)
    weights, config = parameters_of(network), stored_config(network, folder.raw)
    numbers = describe_numbers(config, weights)
    return Conversion(
        name=part.name,
        description=f"{config['architectures'][0]} {numbers}, blocks of {folder.config.block_size}",
        weights=weights,
        config={**config, "dtype": numbers.rpartition(" ")[2]},
        largest=before + largest(weights),
    )
