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
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding, in_one_line
from dflash_mlx.drafters.dflash.block_model import FAMILY as FAMILY
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.config_file import (
    VERSION_1,
    VERSION_2,
    architecture,
    is_speculators,
    parse_fields,
    problems,
    translate,
)
from dflash_mlx.drafters.dflash.context import limit_windows
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.dflash.quantized import quantization_of, quantize_network
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import TensorHeader, read_header
from dflash_mlx.target.model import Target

DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"
CHOOSE_ANOTHER = "choose the drafter of this model with --drafter, or --method none"
_MARKS = ("dflash_config", "speculators_model_type", "speculators_config")
FLOATING, WHOLE, PACKED, FLAGS = "numbers", "whole numbers", "packed numbers", "yes and no"
_KINDS = {
    "F32": FLOATING, "F16": FLOATING, "BF16": FLOATING,
    "I32": WHOLE, "I64": WHOLE, "U32": PACKED, "BOOL": FLAGS,
}  # fmt: skip
_CODEBOOK = "_codebook.weight"
_STORED = {mx.int64: WHOLE, mx.uint32: PACKED}


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
    """The configuration in a folder's config.json; DFlashError where it is of no usable drafter."""
    raw, names = _read(folder)
    return parse_config(raw, str(folder), names)


def parse_config(raw: Any, source: str, names: Collection[str] = ()) -> NetworkConfig:
    """The configuration in a config.json's contents.

    source: where they are from, for messages. names: of the tensors, from which a speculators
    folder shows whether it brings embedding and head. Raises DFlashError as `read_config` does.
    """
    try:
        told = translate(raw, names)
        if (kind := architecture(told)) not in (VERSION_1, VERSION_2):
            raise DFlashError(
                f"{source} holds a {kind}, not a {VERSION_1} or {VERSION_2}",
                "give a DFlash drafter folder with --drafter",
            )
        config = parse_fields(told)
    except KeyError as error:
        raise DFlashError(f"config.json of {source} lacks {error}", DOWNLOAD_AGAIN) from None
    except (ValueError, TypeError, OverflowError) as error:
        problem = in_one_line(error)
        raise DFlashError(f"in {source}/config.json, {problem}", DOWNLOAD_AGAIN) from None
    for problem in problems(config):
        raise DFlashError(f"in {source}, {problem}", DOWNLOAD_AGAIN)
    return config


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
    raw, names = _read(folder)
    config = parse_config(raw, str(folder), names)
    told = {name: value for name, value in translate(raw, names).items() if name != "auto_map"}
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
    """See `FileFormat.load`; raises as `read_drafter` does."""
    config = limit_windows(config, settings.draft_window)
    network = load_network(folder, config, target.dtype, settings.drafter_bits)
    return BlockModel(network, config, target)


def converted(
    folder: Path, has_values: bool, dtype: mx.Dtype | None, bits: int | None, group_size: int | None
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """See `FileFormat.converted`; raises as `read_drafter` does."""
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


def _read(folder: Path) -> tuple[Any, Collection[str]]:
    """The config.json of a folder, and of a speculators folder the names of its tensors."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlashError(f"{folder} has no config.json", "give a drafter folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", DOWNLOAD_AGAIN) from None
    return raw, read_headers(folder) if is_speculators(raw) else ()


def make_network(config: NetworkConfig, source: str) -> Network:
    """The network that a configuration describes, its weights not yet there.

    source: for messages. Raises DFlashError for a rope that mlx-lm does not know, for sizes that
    MLX cannot have and for a quantisation that does not fit.
    """
    try:
        network = Network(config)
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
        reason = f"its rope lacks {error}" if isinstance(error, KeyError) else in_one_line(error)
        what = f"mlx-lm and MLX cannot make the network that {source} describes ({reason})"
        raise DFlashError(what, DOWNLOAD_AGAIN) from None
    if config.quantization is not None:
        quantize_network(network, config.quantization.bits, config.quantization.group_size)
    return network


def parameters_of(network: Network) -> dict[str, mx.array]:
    """The network's arrays by the names that they have in a folder."""
    flat: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    return dict(flat)


def wanted_tensors(config: NetworkConfig, source: str = "the config.json") -> dict[str, str]:
    """All tensors that a folder with this configuration must have, in words; nothing is computed.

    source: for messages. Raises as `make_network` does.
    """
    arrays = parameters_of(make_network(config, source))
    return {n: in_words(_STORED.get(a.dtype, FLOATING), a.shape) for n, a in arrays.items()}


def in_words(kind: str, shape: tuple[int, ...]) -> str:
    """Shape and kind of a tensor. kind: of `_KINDS`, or a dtype that no drafter has."""
    return f"{shape}" if kind == FLOATING else f"{shape} of {kind}"


def check_tensors(
    tensors: Mapping[str, TensorHeader], config: NetworkConfig, source: str
) -> Iterator[Finding]:
    """Tensors that are missing, unexpected or of another shape or kind than the config asks for.

    tensors: by their names in the files. source: what to call the folder. Raises as `make_network`.
    """
    wanted = wanted_tensors(config, source)
    if not tensors:
        what = f"the .safetensors files in {source} hold no tensors"
        yield Finding("error", what, DOWNLOAD_AGAIN)
        return
    plain = plain_names(tensors)
    found = {
        plain[name]: in_words(_KINDS.get(t.dtype, t.dtype), t.shape) for name, t in tensors.items()
    }
    width, head = config.hidden_size, config.draft_vocab_size or config.vocab_size
    optional = {  # which speculators' training leaves
        "verifier_norm.weight": in_words(FLOATING, (width,)),
        "verifier_lm_head.weight": in_words(FLOATING, (head, width)),
    }
    if config.draft_vocab_size is not None:
        optional["t2d"] = in_words(FLAGS, (config.vocab_size,))  # which ids d2t leads to
    for name in sorted(wanted.keys() | found.keys()):
        has = found.get(name, "missing")
        needs = (optional | wanted).get(name, "no such tensor")
        if has != needs:
            what = f"tensor {name} in {source} is {has}, but its config.json asks for {needs}"
            yield Finding("error", what, DOWNLOAD_AGAIN)


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Our names of a folder's tensors, by those that it has.

    speculators keeps the selector's codebooks as embeddings: `*_codebook.weight`.
    """
    plain = {n: n.removesuffix(".weight") if n.endswith(_CODEBOOK) else n for n in names}
    return {name: name if ours != name and ours in names else ours for name, ours in plain.items()}


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a folder by their names in its files; DFlashError for a damaged file."""
    files = sorted(folder.glob("*.safetensors"))  # one, or the shards of one
    return {n: tensor for file in files for n, tensor in read_header(file, DOWNLOAD_AGAIN).items()}


def read_tensors(
    folder: Path, config: NetworkConfig, has_values: bool = True
) -> dict[str, mx.array]:
    """The tensors that the network needs, by its names, lazy.

    has_values: whether there is anything behind the heads of the files. Raises DFlashError, before
    any weight is read, for damaged files, for missing, unexpected or misshapen tensors; and for a
    draft vocabulary that contradicts itself.
    """
    for finding in check_tensors(read_headers(folder), config, str(folder)):
        raise DFlashError(finding.what, finding.next_step)
    tensors: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= mx.load(str(file))  # type: ignore[arg-type]
    tensors = {plain: tensors[name] for name, plain in plain_names(tensors).items()}
    if config.draft_vocab_size is not None:
        tensors["d2t"] = tensors["d2t"].astype(mx.int64)
        if has_values:
            _check_vocabulary(folder, config, np.array(tensors["d2t"]), tensors.get("t2d"))
    return {name: tensors[name] for name in wanted_tensors(config, str(folder))}


def _check_vocabulary(
    folder: Path, config: NetworkConfig, d2t: npt.NDArray[np.int64], t2d: mx.array | None
) -> None:
    """Raise DFlashError unless the draft ids lead to different ids of the target, those of t2d."""
    ids, vocabulary = np.arange(len(d2t)) + d2t, config.vocab_size
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    problem = ""
    if len(outside):
        problem = (
            f"d2t in {folder} leads from draft token {outside[0]} to {ids[outside[0]]}, but the "
            f"vocabulary has {vocabulary}"
        )
    elif (different := len(np.unique(ids))) < len(ids):
        problem = f"d2t in {folder} leads from {len(ids)} draft tokens to only {different} tokens"
    elif t2d is not None and not np.array_equal(np.flatnonzero(np.array(t2d)), np.sort(ids)):
        problem = (
            f"t2d in {folder} marks {int(t2d.sum())} tokens, which are not the {len(ids)} that "
            "d2t leads to"
        )
    if problem:
        raise DFlashError(problem, DOWNLOAD_AGAIN)
