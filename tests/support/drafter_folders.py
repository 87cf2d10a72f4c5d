"""A drafter folder for a tiny target."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder


def drafter_folder(folder, taps, seed):
    config = tiny_drafter_config(
        num_target_layers=3, dflash_config={"mask_token_id": 5, "target_layer_ids": taps}
    )
    write_drafter_folder(folder, config, random_drafter(config, seed))
    network_config = read_config(folder)
    return load_network(folder, network_config, mx.float32), network_config
