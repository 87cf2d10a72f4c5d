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
from dflash_mlx.core.findings import Finding, in_one_line
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.dflash.quantized import quantize_network
from dflash_mlx.system.safetensors_header import TensorHeader, read_header

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


def wanted_headers(config: NetworkConfig, source: str = "the config.json") -> dict[str, Header]:
    """All tensors that a folder with this configuration must have; nothing is computed.

    source: for messages. Raises as `make_network` does.
    """
    arrays = parameters_of(make_network(config, source))
    kinds = {name: _STORED.get(array.dtype, FLOATING) for name, array in arrays.items()}
    return {name: Header(kinds[name], tuple(array.shape)) for name, array in arrays.items()}


def check_tensors(
    tensors: Mapping[str, TensorHeader], config: NetworkConfig, source: str
) -> Iterator[Finding]:
    """Tensors that are missing, unexpected or of another shape or kind than the config asks for.

    tensors: by their names in the files. source: what to call the folder. Raises as `make_network`.
    """
    wanted = wanted_headers(config, source)
    if not tensors:
        what = f"the .safetensors files in {source} hold no tensors"
        yield Finding("error", what, DOWNLOAD_AGAIN)
        return
    plain = plain_names(tensors)
    found = {plain[name]: Header.of(t.dtype, t.shape) for name, t in tensors.items()}
    width, head = config.hidden_size, config.draft_vocab_size or config.vocab_size
    optional = {  # which speculators' training leaves
        "verifier_norm.weight": Header(FLOATING, (width,)),
        "verifier_lm_head.weight": Header(FLOATING, (head, width)),
    }
    if config.draft_vocab_size is not None:
        optional["t2d"] = Header(FLAGS, (config.vocab_size,))  # which ids d2t leads to
    for name in sorted(wanted.keys() | found.keys()):
        has = str(found.get(name, "missing"))
        needs = str((optional | wanted).get(name, "no such tensor"))
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
    return {name: tensors[name] for name in wanted_headers(config, str(folder))}


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
