"""A drafter folder for a tiny target."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder


def drafter_folder(folder, taps, seed, target):
    """A draft model of `target`, read from a folder that is written."""
    config = tiny_drafter_config(
        num_target_layers=target.num_layers,
        dflash_config={"mask_token_id": 5, "target_layer_ids": taps},
    )
    return written(folder, config, random_drafter(config, seed), target)


def written(folder, config, tensors, target):
    """The draft model of `target` that a folder with this configuration and these tensors has."""
    write_drafter_folder(folder, config, tensors)
    network_config = read_config(folder)
    network = load_network(folder, network_config, mx.float32)
    return BlockModel(network, network_config, target)
