"""Tensors of drafter folders: what a configuration asks for and what the files have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.dflash.quantized import quantize_network
from dflash_mlx.system.safetensors_header import read_header

DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"

FLOATING, WHOLE, PACKED, FLAGS = "numbers", "whole numbers", "packed numbers", "yes and no"
_KINDS = {
    "F32": FLOATING, "F16": FLOATING, "BF16": FLOATING,
    "I32": WHOLE, "I64": WHOLE, "U32": PACKED, "BOOL": FLAGS,
}  # fmt: skip
_CODEBOOK = "_codebook.weight"
_STORED = {mx.int64: WHOLE, mx.uint32: PACKED}


class Header(NamedTuple):
    """What a safetensors file says of a tensor before its numbers are read."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> Header:
        """From the words of a safetensors header; a dtype that no drafter has is its own kind."""
        return cls(_KINDS.get(dtype, dtype), tuple(shape))

    def __str__(self) -> str:
        return f"{self.shape}" if self.kind == FLOATING else f"{self.shape} of {self.kind}"


def make_network(config: NetworkConfig, source: str) -> Network:
    """The network that a configuration describes, its weights not yet there.

    source: for messages. Raises DFlashError for a rope that mlx-lm does not know, for sizes that
    MLX cannot have and for a quantisation that does not fit.
    """
    _check_rope(config, source)
    try:
        network = Network(config)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise DFlashError(
            f"MLX cannot make the network that {source} describes ({in_one_line(error)})",
            DOWNLOAD_AGAIN,
        ) from None
    if config.quantization is not None:
        quantize_network(network, config.quantization.bits, config.quantization.group_size)
    return network


def _check_rope(config: NetworkConfig, source: str) -> None:
    from mlx_lm.models.rope_utils import initialize_rope  # takes seconds

    rope, length = config.rope, config.max_position_embeddings
    try:
        initialize_rope(config.head_dim, rope["rope_theta"], False, rope, length)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise DFlashError(
            f"the rope in {source} is {rope}, which mlx-lm refuses ({in_one_line(error)})",
            DOWNLOAD_AGAIN,
        ) from None


def parameters_of(network: Network) -> dict[str, mx.array]:
    """The network's arrays by the names that they have in a folder."""
    flat: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    return dict(flat)


def wanted_headers(config: NetworkConfig, source: str = "the config.json") -> dict[str, Header]:
    """All tensors that a folder with this configuration must have; nothing is computed.

    source: for messages. Raises as `make_network` does.
    """
    arrays = parameters_of(make_network(config, source))
    kinds = {name: _STORED.get(array.dtype, FLOATING) for name, array in arrays.items()}
    return {name: Header(kinds[name], tuple(array.shape)) for name, array in arrays.items()}


def optional_headers(config: NetworkConfig) -> dict[str, Header]:
    """Tensors that may be there as well and are not needed: speculators' training leaves them."""
    d, head = config.hidden_size, config.draft_vocab_size or config.vocab_size
    found = {
        "verifier_norm.weight": Header(FLOATING, (d,)),
        "verifier_lm_head.weight": Header(FLOATING, (head, d)),
    }
    if config.draft_vocab_size is not None:
        found["t2d"] = Header(FLAGS, (config.vocab_size,))  # which ids d2t leads to
    return found


def found_headers(files: list[Path]) -> dict[str, Header]:
    """All tensors, from the heads of the files alone. Raises DFlashError for a damaged file."""
    headers: dict[str, Header] = {}
    for file in files:
        tensors = read_header(file, DOWNLOAD_AGAIN)
        headers |= {name: Header.of(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return {plain: headers[name] for name, plain in plain_names(headers).items()}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Our names of a folder's tensors, by those that it has.

    speculators keeps the selector's codebooks as embeddings: `*_codebook.weight`.
    """
    plain = {n: n.removesuffix(".weight") if n.endswith(_CODEBOOK) else n for n in names}
    return {name: name if ours != name and ours in names else ours for name, ours in plain.items()}


def read_tensors(folder: Path, config: NetworkConfig) -> dict[str, mx.array]:
    """The tensors that the network needs, by its names, lazy.

    Raises DFlashError, before any weight is read, for damaged files, for missing, unexpected or
    misshapen tensors; and for a draft vocabulary that contradicts itself.
    """
    files = drafter_files(folder)
    found = found_headers(files)
    if files and not found:
        raise DFlashError(f"the .safetensors files in {folder} hold no tensors", DOWNLOAD_AGAIN)
    wanted = wanted_headers(config, str(folder))
    for name, has, needs in differences(found, wanted, optional_headers(config)):
        raise DFlashError(
            f"tensor {name} in {folder} is {has}, but its config.json asks for {needs}",
            DOWNLOAD_AGAIN,
        )
    tensors: dict[str, mx.array] = {}
    for file in files:
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict)
        tensors |= arrays
    tensors = {plain: tensors[name] for name, plain in plain_names(tensors).items()}
    if config.draft_vocab_size is not None:
        tensors["d2t"] = tensors["d2t"].astype(mx.int64)
        _check_vocabulary(folder, config, np.array(tensors["d2t"]), tensors.get("t2d"))
    return {name: tensors[name] for name in wanted}


def drafter_files(folder: Path) -> list[Path]:
    """One file, or the shards of one."""
    return sorted(folder.glob("*.safetensors"))


def differences(
    found: Mapping[str, Header], wanted: Mapping[str, Header], optional: Mapping[str, Header]
) -> Iterator[tuple[str, str, str]]:
    """Tensors that are missing, unexpected or unlike: the name, what it is, what it should be."""
    expected = {**{name: optional[name] for name in optional.keys() & found.keys()}, **wanted}
    for name in sorted(expected.keys() | found.keys()):
        has, needs = found.get(name, "missing"), expected.get(name, "no such tensor")
        if has != needs:
            yield name, str(has), str(needs)


def _check_vocabulary(
    folder: Path, config: NetworkConfig, d2t: npt.NDArray[np.int64], t2d: mx.array | None
) -> None:
    """Raise DFlashError unless the draft ids lead to different ids of the target, those of t2d."""
    ids, vocabulary = np.arange(len(d2t)) + d2t, config.vocab_size
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        draft_id = int(outside.argmax())
        raise DFlashError(
            f"d2t in {folder} leads from draft token {draft_id} to {ids[draft_id]}, but the "
            f"vocabulary has {vocabulary}",
            DOWNLOAD_AGAIN,
        )
    if (different := len(np.unique(ids))) < len(ids):
        raise DFlashError(
            f"d2t in {folder} leads from {len(ids)} draft tokens to only {different} tokens",
            DOWNLOAD_AGAIN,
        )
    if t2d is not None and not np.array_equal(np.flatnonzero(np.array(t2d)), np.sort(ids)):
        raise DFlashError(
            f"t2d in {folder} marks {int(t2d.sum())} tokens, which are not the {len(ids)} that "
            "d2t leads to",
            DOWNLOAD_AGAIN,
        )
