"""Draft networks in safetensors files, also with matrices that MLX has packed in 4 or 8 bits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import TensorHeader, read_header

DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"
FLOATING, WHOLE, PACKED, FLAGS = "numbers", "whole numbers", "packed numbers", "yes and no"
_KINDS: dict[str | mx.Dtype, str] = {  # of dtypes, as files name them and as MLX has them
    "F32": FLOATING, "F16": FLOATING, "BF16": FLOATING, "I32": WHOLE, "I64": WHOLE, "U32": PACKED,
    "BOOL": FLAGS, mx.int64: WHOLE, mx.uint32: PACKED, mx.float32: FLOATING,
}  # fmt: skip

Arrays = dict[str, mx.array]

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
_AT_LOAD = (64, 32)  # the largest that fits is taken where none is asked for
# Small, and what they add decides between near candidates
KEPT = ("candidate_selector", "markov_head", "confidence_head")


@dataclass(frozen=True)
class Quantization:
    """How matrices are packed; names as in the config.json of MLX folders."""

    group_size: int
    bits: int


def quantize_network(network: nn.Module, bits: int, group_size: int | None = None) -> None:
    """Pack the matrices of a drafter network in place, lazily.

    Norms, DFlash 2's base kernels, its candidate selector and DSpark's heads keep their numbers; so
    does what is packed already. bits: 4 or 8. group_size: numbers that share a scale and a bias,
    32, 64 or 128; None for the larger of 64 and 32 that fits all of them. Raises DFlashError for
    other values, and where a matrix has rows of a length that the groups do not divide.
    """
    if bits not in BITS:
        raise DFlashError(f"bits of a quantised drafter is {bits!r}", f"choose one of {BITS}")
    if group_size not in (None, *GROUP_SIZES):
        raise DFlashError(
            f"group_size of a quantised drafter is {group_size!r}", f"choose one of {GROUP_SIZES}"
        )
    size = _group_size(network, group_size)
    nn.quantize(network, size, bits, class_predicate=_is_packed)


def quantization_of(network: nn.Module) -> Quantization | None:
    """How the network's matrices are packed, None where they are not."""
    for _, module in network.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            return Quantization(module.group_size, module.bits)
    return None


def _group_size(network: nn.Module, asked: int | None) -> int:
    rows = {p: m.weight.shape[-1] for p, m in network.named_modules() if _is_packed(p, m)}
    for size in _AT_LOAD if asked is None else (asked,):
        other = next((path for path, length in rows.items() if length % size), None)
        if other is None:
            return size
    way = "leave out --drafter-bits" if asked is None else "choose a smaller group_size"
    raise DFlashError(
        f"the drafter's {other} has rows of {rows[other]} numbers, which groups of {size} do not "
        "divide",
        way,
    )


def _is_packed(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and not any(kept in path for kept in KEPT)


def save_network(folder: Path, network: nn.Module, raw: dict[str, Any]) -> None:
    """Write config.json and model.safetensors (bfloat16, or as MLX has packed it) into `folder`.

    raw: the config.json. Each file is complete before it takes its name, so a reader, or a full
    disk (OSError), never meets half of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = parameters_of(network)
    for name, array in weights.items():
        if mx.issubdtype(array.dtype, mx.floating):
            weights[name] = array.astype(mx.bfloat16)
    replace_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
    text = json.dumps({**stored_config(network, raw), "dtype": "bfloat16"}, indent=2)
    replace_text(folder / "config.json", text + "\n")


def stored_config(network: nn.Module, raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a folder with this network, which says how it is packed."""
    packed = quantization_of(network)
    return raw if packed is None else {**raw, "quantization": asdict(packed)}


def read_json(folder: Path) -> Any:
    """The config.json of a folder; DFlashError where it cannot be read."""
    file = folder / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlashError(f"{folder} has no config.json", "give a drafter folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", DOWNLOAD_AGAIN) from None


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a folder by their names in its files; DFlashError for a damaged file."""
    files = sorted(folder.glob("*.safetensors"))  # one, or the shards of one
    return {n: tensor for file in files for n, tensor in read_header(file, DOWNLOAD_AGAIN).items()}


def parameters_of(network: nn.Module) -> Arrays:
    """The network's arrays by the names that they have in a folder."""
    flat: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    return dict(flat)


def in_words(dtype: str | mx.Dtype, shape: tuple[int, ...]) -> str:
    """Shape and kind of a tensor. dtype: as files or MLX have it, or a kind."""
    kind = _KINDS.get(dtype, dtype)
    return f"{shape}" if kind == FLOATING else f"{shape} of {kind}"


def check_vocabulary(
    folder: Path, vocabulary: int, d2t: npt.NDArray[np.int64], t2d: mx.array | None
) -> None:
    """Raise DFlashError unless the draft ids lead to different ids of the target, those of t2d."""
    ids = np.arange(len(d2t)) + d2t
    for token, to in enumerate(ids):
        if not 0 <= to < vocabulary:
            what = f"d2t in {folder} leads from draft token {token} to {to}, but the vocabulary has"
            raise DFlashError(f"{what} {vocabulary}", DOWNLOAD_AGAIN)
    if (different := len(np.unique(ids))) < len(ids):
        what = f"d2t in {folder} leads from {len(ids)} draft tokens to only {different} tokens"
        raise DFlashError(what, DOWNLOAD_AGAIN)
    if t2d is not None and not np.array_equal(np.flatnonzero(np.array(t2d)), np.sort(ids)):
        what = f"t2d in {folder} marks {int(t2d.sum())} tokens, which are not the {len(ids)} that "
        raise DFlashError(f"{what}d2t leads to", DOWNLOAD_AGAIN)
