"""Reading and writing drafter folders; all is checked before any weight is read.

Formats: z-lab's DFlash (variable-prefix drafters have the same) and DFlash 2, vLLM's speculators,
and our own folders, which are z-lab's with weights that MLX may have packed. A format is read by
telling its config.json in z-lab's words, so what follows knows one format only.

This is the file side of the family; `drafters/formats.py` says what every family offers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding, in_one_line
from dflash_mlx.drafters.dflash import speculators
from dflash_mlx.drafters.dflash.block_model import FAMILY as FAMILY
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.config_file import (
    VERSION_1,
    VERSION_2,
    architecture,
    parse_fields,
    problems,
)
from dflash_mlx.drafters.dflash.context import limit_windows
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.dflash.quantized import quantization_of, quantize_network
from dflash_mlx.drafters.dflash.tensors import (
    DOWNLOAD_AGAIN,
    make_network,
    parameters_of,
    read_headers,
    read_tensors,
)
from dflash_mlx.drafters.dflash.tensors import check_tensors as check_tensors  # with the others
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.target.model import Target

CHOOSE_ANOTHER = "choose the drafter of this model with --drafter, or --method none"
_MARKS = ("dflash_config", "speculators_model_type", "speculators_config")


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


def recognises(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of these formats, readable or not."""
    return architecture(raw).startswith("DFlash") or any(mark in raw for mark in _MARKS)


def read_config(folder: Path) -> NetworkConfig:
    """The drafter's configuration from `folder`/config.json.

    Raises DFlashError when the file is missing, damaged, incomplete, inconsistent or describes
    another kind of drafter.
    """
    return _read(folder)[0]


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
    return config, told


def misfits(
    config: NetworkConfig, target: Mapping[str, Any], name: str, drafter: str = ""
) -> Iterator[Finding]:
    """What keeps a drafter from a target, each with both values.

    target: `hidden_size`, `vocab_size` and `num_hidden_layers` as in the target's config.json.
    name, drafter: what to call the two.
    """
    who = f"the drafter {drafter}".rstrip()
    made_for = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers,
    }
    for field, number in made_for.items():
        if number is not None and (has := target.get(field)) != number:
            words = field.replace("num_hidden_layers", "number of target layers")
            what = f"{who} was made for a target with {words} {number}, but {name} has "
            yield Finding("error", what + str(has)[:80], CHOOSE_ANOTHER)
    layers, last = target.get("num_hidden_layers"), max(config.target_layer_ids)
    if config.num_target_layers is None and type(layers) is int and last >= layers:
        what = f"{who} reads layer {last} (counted from 0), but {name} has {layers} layers"
        yield Finding("error", what, CHOOSE_ANOTHER)


def check_fit(config: NetworkConfig, target: Mapping[str, Any], name: str) -> None:
    """Raise DFlashError unless the drafter was made for this target, see `misfits`."""
    for misfit in misfits(config, target, name):
        raise DFlashError(misfit.what, misfit.next_step)


def read_drafter(folder: Path, has_values: bool = True) -> DrafterFolder:
    """A drafter folder of any format, checked, its tensors under our names and still lazy.

    has_values: whether there is anything behind the heads of its weight files. Raises DFlashError,
    before any weight is read, for a config.json that `read_config` refuses, for damaged files and
    for missing, unexpected or misshapen tensors.
    """
    config, told = _read(folder)
    told = {name: value for name, value in told.items() if name != "auto_map"}
    return DrafterFolder(config, read_tensors(folder, config, has_values), told)


def load_network(
    folder: Path, config: NetworkConfig, dtype: mx.Dtype, bits: int | None = None
) -> Network:
    """The drafter's weights from the safetensors files of `folder`, cast to `dtype`.

    config: what `read_config` found there. bits: pack the matrices of a drafter that is not packed
    yet (see `quantize_network`). Raises as `read_drafter` does.
    """
    network = DrafterFolder(config, read_tensors(folder, config), {}).network()
    network.set_dtype(dtype)
    if bits is not None and config.quantization is None:
        quantize_network(network, bits)
    network.drop_idle_convolutions(config)
    mx.eval(network.parameters())
    return network


def load(folder: Path, config: NetworkConfig, target: Target, settings: PairConfig) -> BlockModel:
    """The drafter in `folder`, bound to its target; raises as `read_drafter` does.

    config: what `read_config` found there.
    """
    config = limit_windows(config, settings.draft_window)
    network = load_network(folder, config, target.dtype, settings.drafter_bits)
    return BlockModel(network, config, target)


def converted(
    folder: Path, has_values: bool, dtype: mx.Dtype | None, bits: int | None, group_size: int | None
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The weights, lazy, and the config.json of a drafter in our format, whatever it is in.

    dtype: cast to it; bits, group_size: pack the matrices (see `quantize_network`); None for as
    they are. The rest, and what it raises, as of `read_drafter`.
    """
    drafter = read_drafter(folder, has_values)
    network = drafter.network()
    if dtype is not None:
        network.set_dtype(dtype)
    if bits is not None:
        quantize_network(network, bits, group_size)
    return parameters_of(network), _stored_config(network, drafter.raw)


def save_drafter(folder: Path, network: Network, raw_config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors (bfloat16, or as MLX has packed it) into `folder`.

    raw_config: in z-lab's format. Each file is complete before it takes its name, so a reader, or a
    full disk (OSError), never meets half of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = parameters_of(network)
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating):
            weights[name] = array.astype(mx.bfloat16)
    replace_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    raw = {**_stored_config(network, raw_config), "dtype": "bfloat16"}
    replace_text(folder / "config.json", json.dumps(raw, indent=2) + "\n")


def _stored_config(network: Network, raw_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a folder with this network, which says how it is packed."""
    packed = quantization_of(network)
    return raw_config if packed is None else {**raw_config, "quantization": asdict(packed)}


def _read(folder: Path) -> tuple[NetworkConfig, dict[str, Any]]:
    """As `_parse`, from a folder."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlashError(f"{folder} has no config.json", "give a drafter folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", DOWNLOAD_AGAIN) from None
    names = read_headers(folder) if speculators.is_speculators(raw) else ()
    return _parse(raw, str(folder), names)
