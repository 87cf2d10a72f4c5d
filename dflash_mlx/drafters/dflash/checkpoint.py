"""Reading drafter folders; everything is checked before any weight is read.

Formats: z-lab's DFlash (variable-prefix drafters have the same) and DFlash 2, vLLM's speculators,
and our own folders, which are z-lab's with weights that MLX may have packed. A format is read by
telling its config.json in z-lab's words, so what follows knows one format only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.drafters.dflash import speculators
from dflash_mlx.drafters.dflash.config_file import (
    VERSION_1,
    VERSION_2,
    architecture,
    parse_fields,
    problems,
)
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.dflash.quantized import quantize_network
from dflash_mlx.drafters.dflash.tensors import (
    DOWNLOAD_AGAIN,
    drafter_files,
    found_headers,
    make_network,
    read_tensors,
)


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter folder of any format, as it would be in ours.

    tensors: by our names, lazy. raw: its config.json in z-lab's format, without what asks to run
    code of its own.
    """

    config: NetworkConfig
    tensors: dict[str, mx.array]
    raw: dict[str, Any]

    def network(self) -> Network:
        """The network with these tensors; nothing is evaluated, nothing cast."""
        network = make_network(self.config, "config.json")
        network.load_weights(list(self.tensors.items()))
        return network


def read_config(folder: Path) -> NetworkConfig:
    """The drafter's configuration from `folder`/config.json.

    Raises DFlashError when the file is missing, damaged, incomplete, inconsistent or describes
    another kind of drafter.
    """
    return parse_config(*_contents(folder))


def parse_config(raw: Any, source: str, names: Collection[str] = ()) -> NetworkConfig:
    """The configuration in a config.json's contents.

    source: where they are from, for messages. names: of the tensors, from which a speculators
    folder shows whether it brings embedding and head. Raises DFlashError as `read_config` does.
    """
    return _parse(raw, source, names)[0]


def _parse(raw: Any, source: str, names: Collection[str]) -> tuple[NetworkConfig, dict[str, Any]]:
    """The configuration, and the config.json in z-lab's format."""
    is_translated = speculators.is_speculators(raw)
    if not is_translated and (kind := architecture(raw)) not in (VERSION_1, VERSION_2):
        raise DFlashError(
            f"{source} holds a {kind}, not a {VERSION_1} or {VERSION_2}",
            "give a DFlash drafter folder with --drafter",
        )
    try:
        told = speculators.translate(raw, names) if is_translated else raw
        config = parse_fields(told)
    except KeyError as error:
        raise DFlashError(f"config.json of {source} lacks {error}", DOWNLOAD_AGAIN) from None
    except (ValueError, TypeError, OverflowError) as error:
        problem = in_one_line(error)
        raise DFlashError(f"in {source}/config.json, {problem}", DOWNLOAD_AGAIN) from None
    for problem in problems(config):
        raise DFlashError(f"in {source}, {problem}", DOWNLOAD_AGAIN)
    if is_translated:
        config = replace(config, notes=speculators.notes(raw, config.target_layer_ids))
        told = {**told, "notes": list(config.notes)} if config.notes else told
    return config, told


class Misfit(NamedTuple):
    """A number of the two configurations that differs. what: the drafter's side, for a sentence."""

    what: str
    field: str
    made_for: int
    has: Any
    unit: str = ""


def misfits(config: NetworkConfig, target: Mapping[str, Any]) -> Iterator[Misfit]:
    """What keeps a drafter from a target with this configuration.

    target: `hidden_size`, `vocab_size` and `num_hidden_layers` as in the target's config.json.
    """
    numbers = {
        "hidden_size": ("hidden_size", config.hidden_size),
        "vocab_size": ("vocab_size", config.vocab_size),
        "num_hidden_layers": ("number of target layers", config.num_target_layers),
    }
    for field, (words, made_for) in numbers.items():
        has = target.get(field)
        if made_for is not None and has != made_for:
            yield Misfit(f"was made for a target with {words} {made_for}", field, made_for, has)
    layers, last = target.get("num_hidden_layers"), max(config.target_layer_ids)
    if config.num_target_layers is None and type(layers) is int and last >= layers:
        what = f"reads layer {last} (counted from 0)"
        yield Misfit(what, "target_layer_ids", last, layers, " layers")


def check_fit(config: NetworkConfig, target: Mapping[str, Any], name: str) -> None:
    """Raise DFlashError unless the drafter was made for this target, see `misfits`."""
    for misfit in misfits(config, target):
        raise DFlashError(
            f"the drafter {misfit.what}, but {name} has {misfit.has}{misfit.unit}",
            "choose the drafter of this model with --drafter, or --method none",
        )


def check_block_size(block_size: int | None, config: NetworkConfig) -> None:
    """Raise DFlashError unless the drafter can draft blocks of `block_size` (None: its own)."""
    if block_size is not None and not 2 <= block_size <= config.block_size:
        raise DFlashError(
            f"block_size is {block_size}, but this drafter was trained for blocks of "
            f"{config.block_size}",
            f"choose 2 to {config.block_size}",
        )


def read_drafter(folder: Path) -> DrafterFolder:
    """A drafter folder of any format, checked, its tensors under our names and still lazy.

    Raises DFlashError, before any weight is read, for a config.json that `read_config` refuses,
    for damaged files and for missing, unexpected or misshapen tensors.
    """
    config, told = _parse(*_contents(folder))
    told = {name: value for name, value in told.items() if name != "auto_map"}
    return DrafterFolder(config, read_tensors(folder, config), told)


def load_network(
    folder: Path, config: NetworkConfig, dtype: mx.Dtype, bits: int | None = None
) -> Network:
    """The drafter's weights from the safetensors files of `folder`, cast to `dtype`.

    config: what `read_config` found there. bits: pack the matrices of a drafter that is not packed
    yet (see `quantize_network`). Raises as `read_drafter` does.
    """
    network = make_network(config, str(folder))
    network.load_weights(list(read_tensors(folder, config).items()))
    network.set_dtype(dtype)
    if bits is not None and config.quantization is None:
        quantize_network(network, bits)
    network.drop_idle_convolutions(config)
    mx.eval(network.parameters())
    return network


def _contents(folder: Path) -> tuple[Any, str, Collection[str]]:
    """What config.json has, where it is, and the names of the tensors where the format needs it."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlashError(f"{folder} has no config.json", "give a drafter folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", DOWNLOAD_AGAIN) from None
    names = found_headers(drafter_files(folder)) if speculators.is_speculators(raw) else ()
    return raw, str(folder), names
