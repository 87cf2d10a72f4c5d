"""Draft networks in safetensors files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks.quantized import quantization_of
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import TensorHeader, read_header

DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"
FLOATING, WHOLE, PACKED, FLAGS = "numbers", "whole numbers", "packed numbers", "yes and no"
_KINDS: dict[str | mx.Dtype, str] = {  # of dtypes, as files name them and as MLX has them
    "F32": FLOATING, "F16": FLOATING, "BF16": FLOATING, "I32": WHOLE, "I64": WHOLE, "U32": PACKED,
    "BOOL": FLAGS, mx.int64: WHOLE, mx.uint32: PACKED, mx.float32: FLOATING,
}  # fmt: skip

Arrays = dict[str, mx.array]


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
