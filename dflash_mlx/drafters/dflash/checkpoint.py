"""Reading and writing drafter folders; all is checked before any weight is read.

Formats: z-lab's DFlash (variable-prefix drafters have the same) and DFlash 2, DSpark as DeepSeek
and others have it, vLLM's speculators, and our own folders, which are z-lab's with weights that MLX
may have packed. A format is read by
telling its config.json in z-lab's words, so what follows knows one format only.

This is the file side of the family; `drafters/formats.py` says what every family offers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding
from dflash_mlx.drafters.dflash.block_model import FAMILY as FAMILY
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.config_file import (
    DSPARK,
    OTHERS,
    VERSION_1,
    VERSION_2,
    parse_fields,
    problems,
    tells_by_tensors,
    translate,
)
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.formats import CHOOSE_ANOTHER, called, size_misfits
from dflash_mlx.drafters.networks import tensors as files
from dflash_mlx.drafters.networks.fields import architecture
from dflash_mlx.drafters.networks.layers import limit_windows
from dflash_mlx.drafters.networks.tensors import FLOATING, DrafterFolder, Layout, in_words
from dflash_mlx.verifier.model import Target

_MARKS = ("dflash_config", "speculators_model_type", "speculators_config")
_CODEBOOK = "_codebook.weight"


def recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of these formats, readable or not."""
    if raw.get("speculators_model_type") in OTHERS:
        return False
    name = architecture(raw)
    return name.startswith("DFlash") or "DSpark" in name or any(mark in raw for mark in _MARKS)


def read_config(folder: Path) -> NetworkConfig:
    """The configuration in a folder's config.json; DFlashError where it is of no usable drafter."""
    raw, names = _read(folder)
    return parse_config(raw, str(folder), names)


def parse_config(raw: Any, source: str, names: Collection[str] = ()) -> NetworkConfig:
    """The configuration in a config.json's contents.

    source: where they are from, for messages. names: of the tensors, which of some formats show
    whether they bring embedding and head. Raises DFlashError as `read_config` does.
    """

    def parse() -> NetworkConfig:
        told = translate(raw, names)
        if (kind := architecture(told)) not in (VERSION_1, VERSION_2, DSPARK):
            raise DFlashError(
                f"{source} holds a {kind}, not a {VERSION_1}, {VERSION_2} or {DSPARK}",
                "give a DFlash or DSpark drafter folder with --drafter",
            )
        return parse_fields(told)

    config: NetworkConfig = files.parsed(parse, problems, source)
    return config


def misfits(
    config: NetworkConfig, target: Mapping[str, Any], name: str, drafter: str = ""
) -> Iterator[Finding]:
    """What keeps a drafter from a target, each with both values.

    target: `hidden_size`, `vocab_size` and `num_hidden_layers` as in the target's config.json.
    name, drafter: what to call the two.
    """
    who = called(drafter)
    made_for = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers,
    }
    yield from size_misfits(made_for, target, name, drafter)
    layers, last = target.get("num_hidden_layers"), max(config.target_layer_ids)
    if config.num_target_layers is None and type(layers) is int and last >= layers:
        what = f"{who} reads layer {last} (counted from 0), but {name} has {layers} layers"
        yield Finding("error", what, CHOOSE_ANOTHER)


def read_drafter(folder: Path, has_values: bool = True) -> DrafterFolder:
    """See `FileFormat.read_drafter`."""
    raw, names = _read(folder)
    config = parse_config(raw, str(folder), names)
    return LAYOUT.folder(folder, config, translate(raw, names), has_values)


def load_network(
    folder: Path, config: NetworkConfig, dtype: mx.Dtype, bits: int | None = None
) -> Network:
    """The drafter's weights from the safetensors files of `folder`, cast to `dtype`.

    config: what `read_config` found there. bits: pack the matrices of a drafter that is not packed
    yet (see `quantize_network`). Raises as `read_drafter` does.
    """
    network: Network = LAYOUT.load(folder, config, dtype, bits)
    network.drop_idle_convolutions(config)
    mx.eval(network.parameters())
    return network


def load(folder: Path, config: NetworkConfig, target: Target, settings: PairConfig) -> BlockModel:
    """See `FileFormat.load`; raises as `read_drafter` does."""
    windows = limit_windows(config.layer_windows, settings.draft_window)
    config = replace(config, layer_windows=windows)
    network = load_network(folder, config, target.dtype, settings.drafter_bits)
    return BlockModel(network, config, target)


def _read(folder: Path) -> tuple[Any, Collection[str]]:
    """The config.json of a folder, and the names of its tensors where these tell anything."""
    raw = files.read_json(folder)
    return raw, files.read_headers(folder) if tells_by_tensors(raw) else ()


def _left_by_training(config: NetworkConfig) -> dict[str, str]:
    """Tensors that speculators' training leaves."""
    width, head = config.hidden_size, config.draft_vocab_size or config.vocab_size
    return {
        "verifier_norm.weight": in_words(FLOATING, (width,)),
        "verifier_lm_head.weight": in_words(FLOATING, (head, width)),
    }


def _plain_names(names: Collection[str]) -> dict[str, str]:
    """Speculators keeps the selector's codebooks as embeddings: `*_codebook.weight`."""
    plain = {n: n.removesuffix(".weight") if n.endswith(_CODEBOOK) else n for n in names}
    return {name: name if ours != name and ours in names else ours for name, ours in plain.items()}


LAYOUT = Layout(Network, _plain_names, _left_by_training)
check_tensors = LAYOUT.check
