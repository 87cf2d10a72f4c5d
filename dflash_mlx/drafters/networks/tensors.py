"""Draft networks in safetensors files; all is checked before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import Finding, in_one_line
from dflash_mlx.drafters.networks.quantized import Quantization, quantization_of, quantize_network
from dflash_mlx.system import cpu_math
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import TensorHeader, read_header

DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"
FLOATING, WHOLE, PACKED, FLAGS = "numbers", "whole numbers", "packed numbers", "yes and no"
_KINDS = {
    "F32": FLOATING, "F16": FLOATING, "BF16": FLOATING,
    "I32": WHOLE, "I64": WHOLE, "U32": PACKED, "BOOL": FLAGS,
}  # fmt: skip
_STORED = {mx.int64: WHOLE, mx.uint32: PACKED}

Arrays = dict[str, mx.array]
Problems = dict[str, Any]  # contradictions in words, each with whether it holds


class StoredConfig(Protocol):
    """What the files of any network depend on.

    draft_vocab_size: tokens that its own head knows, None for all of the target's.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def draft_vocab_size(self) -> int | None: ...  # noqa: D102
    @property
    def quantization(self) -> Quantization | None: ...  # noqa: D102


@dataclass(frozen=True)
class Layout:
    """How a family's networks lie in folders.

    build: the network of a configuration. ours: the network's names of tensors, by those in files.
    optional: of a configuration, tensors in words that may be there and are not needed.
    """

    build: Callable[[Any], nn.Module]
    ours: Callable[[Collection[str]], dict[str, str]] = lambda names: {name: name for name in names}
    optional: Callable[[Any], dict[str, str]] = lambda config: {}

    def network(self, config: StoredConfig, source: str) -> Any:
        """The network that a configuration describes, its weights not yet there.

        source: for messages. Raises DFlashError for a rope that mlx-lm does not know, for sizes
        that MLX cannot have and for a quantisation that does not fit.
        """
        try:
            network = self.build(config)
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
            reason = (
                f"its rope lacks {error}" if isinstance(error, KeyError) else in_one_line(error)
            )
            what = f"mlx-lm and MLX cannot make the network that {source} describes ({reason})"
            raise DFlashError(what, DOWNLOAD_AGAIN) from None
        if config.quantization is not None:
            quantize_network(network, config.quantization.bits, config.quantization.group_size)
        return network

    def wanted(self, config: StoredConfig, source: str = "the config.json") -> dict[str, str]:
        """All tensors that a folder with this configuration must have, in words; nothing computed.

        Raises as `network` does.
        """
        arrays = parameters_of(self.network(config, source))
        return {n: in_words(_STORED.get(a.dtype, FLOATING), a.shape) for n, a in arrays.items()}

    def check(
        self, tensors: Mapping[str, TensorHeader], config: StoredConfig, source: str
    ) -> Iterator[Finding]:
        """Tensors that are missing, unexpected or of another shape or kind than is asked for.

        tensors: by their names in the files. source: what to call the folder. Raises as `network`.
        """
        wanted = self.wanted(config, source)
        if not tensors:
            what = f"the .safetensors files in {source} hold no tensors"
            yield Finding("error", what, DOWNLOAD_AGAIN)
            return
        ours = self.ours(tensors)
        found = {
            ours[name]: in_words(_KINDS.get(t.dtype, t.dtype), t.shape)
            for name, t in tensors.items()
        }
        optional = self.optional(config)
        if config.draft_vocab_size is not None:
            optional["t2d"] = in_words(FLAGS, (config.vocab_size,))  # which ids d2t leads to
        for name in sorted(wanted.keys() | found.keys()):
            has = found.get(name, "missing")
            needs = (optional | wanted).get(name, "no such tensor")
            if has != needs and not (name in optional and has == "missing"):
                what = f"tensor {name} in {source} is {has}, but its config.json asks for {needs}"
                yield Finding("error", what, DOWNLOAD_AGAIN)

    def read(self, folder: Path, config: StoredConfig, has_values: bool = True) -> Arrays:
        """The tensors that the network needs, by its names, lazy.

        has_values: whether there is anything behind the heads of the files. Raises DFlashError,
        before any weight is read, for damaged files, for missing, unexpected or misshapen tensors;
        and for a draft vocabulary that contradicts itself.
        """
        for finding in self.check(read_headers(folder), config, str(folder)):
            raise DFlashError(finding.what, finding.next_step)
        tensors: Arrays = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= mx.load(str(file))  # type: ignore[arg-type]
        tensors = {ours: tensors[name] for name, ours in self.ours(tensors).items()}
        if config.draft_vocab_size is not None:
            tensors["d2t"] = tensors["d2t"].astype(mx.int64)
            if has_values:
                offsets, marked = np.array(tensors["d2t"]), tensors.get("t2d")
                _check_vocabulary(folder, config.vocab_size, offsets, marked)
        return {name: tensors[name] for name in self.wanted(config, str(folder))}

    def folder(
        self, folder: Path, config: StoredConfig, raw: dict[str, Any], has_values: bool
    ) -> DrafterFolder:
        """A folder with this configuration, raw in our format; as `FileFormat.read_drafter`."""
        told = {name: value for name, value in raw.items() if name != "auto_map"}
        return DrafterFolder(self, config, self.read(folder, config, has_values), told)

    def load(
        self, folder: Path, config: StoredConfig, dtype: mx.Dtype, bits: int | None = None
    ) -> Any:
        """The network with the weights in `folder`, cast to `dtype`, not yet evaluated.

        bits: pack the matrices of a network that is not packed yet (see `quantize_network`). Raises
        as `read` does.
        """
        network = filled(self.network(config, str(folder)), self.read(folder, config))
        network.set_dtype(dtype)
        if bits is not None and config.quantization is None:
            quantize_network(network, bits)
        return network


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter folder of any format, as it would be in ours.

    tensors: by our names, lazy. raw: its config.json in our format, without what asks to run code
    of its own.
    """

    layout: Layout
    config: Any
    tensors: Arrays
    raw: dict[str, Any]

    def network(self) -> Any:
        """The network with these tensors; nothing is evaluated, nothing cast."""
        return filled(self.layout.network(self.config, "config.json"), self.tensors)

    def converted(
        self, dtype: mx.Dtype | None, bits: int | None, group_size: int | None
    ) -> tuple[Arrays, dict[str, Any]]:
        """Lazy weights and config.json in our format, cast and packed where that is not None."""
        network = self.network()
        if dtype is not None:
            network.set_dtype(dtype)
        if bits is not None:
            quantize_network(network, bits, group_size)
        return parameters_of(network), stored_config(network, self.raw)


def unpacked(network: Any, config: StoredConfig) -> Any:
    """The evaluated network; on a CPU without packed matrices, which are slow there."""
    if config.quantization is not None and cpu_math.applies():
        from mlx_lm.utils import dequantize_model  # takes seconds

        network = dequantize_model(network)
    mx.eval(network.parameters())
    return network


def filled(network: Any, tensors: Arrays) -> Any:
    """`network` with these tensors; nothing is evaluated, nothing cast."""
    network.load_weights(list(tensors.items()))
    return network


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


def parsed(parse: Callable[[], Any], problems: Callable[[Any], Problems], source: str) -> Any:
    """What `parse` reads of a config.json, free of `problems`; DFlashError for anything else.

    source: where it is from.
    """
    try:
        config = parse()
    except KeyError as error:
        raise DFlashError(f"config.json of {source} lacks {error}", DOWNLOAD_AGAIN) from None
    except (ValueError, TypeError, OverflowError) as error:
        problem = in_one_line(error)
        raise DFlashError(f"in {source}/config.json, {problem}", DOWNLOAD_AGAIN) from None
    for problem, wrong in problems(config).items():
        if wrong:
            raise DFlashError(f"in {source}, {problem}", DOWNLOAD_AGAIN)
    return config


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a folder by their names in its files; DFlashError for a damaged file."""
    files = sorted(folder.glob("*.safetensors"))  # one, or the shards of one
    return {n: tensor for file in files for n, tensor in read_header(file, DOWNLOAD_AGAIN).items()}


def parameters_of(network: nn.Module) -> Arrays:
    """The network's arrays by the names that they have in a folder."""
    flat: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    return dict(flat)


def in_words(kind: str, shape: tuple[int, ...]) -> str:
    """Shape and kind of a tensor. kind: of `_KINDS`, or a dtype that no drafter has."""
    return f"{shape}" if kind == FLOATING else f"{shape} of {kind}"


def _check_vocabulary(
    folder: Path, vocabulary: int, d2t: npt.NDArray[np.int64], t2d: mx.array | None
) -> None:
    """Raise DFlashError unless the draft ids lead to different ids of the target, those of t2d."""
    ids, problem = np.arange(len(d2t)) + d2t, ""
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
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
