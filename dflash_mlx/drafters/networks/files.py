"""A draft model's folder: its configuration, and its tensors, packed by MLX or not.

A field of a configuration says in its metadata how it is read; readers raise as those in `fields`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from dflash_mlx.core.config import AS_STORED, BITS
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.text import read_json_file
from dflash_mlx.drafters.networks.fields import (
    Fields,
    flag,
    head_dim,
    layer_windows,
    listed,
    number,
    rope,
    size,
    whole,
)
from dflash_mlx.system import cpu_math
from dflash_mlx.system.files import replace_safetensors, replace_text
from dflash_mlx.system.safetensors_header import MAX_DIMENSION, TensorHeader, read_header

DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"
FLOATING, WHOLE, PACKED, FLAGS = "numbers", "whole numbers", "packed numbers", "yes and no"
_KINDS: dict[str | mx.Dtype, str] = {  # of dtypes, as files name them and as MLX has them
    "F32": FLOATING, "F16": FLOATING, "BF16": FLOATING, "I32": WHOLE, "I64": WHOLE, "U32": PACKED,
    "BOOL": FLAGS, mx.int64: WHOLE, mx.uint32: PACKED, mx.float32: FLOATING,
    mx.float16: FLOATING, mx.bfloat16: FLOATING,
}  # fmt: skip

Arrays = dict[str, mx.array]

ON_A_GPU = 8  # bits that draft models are loaded in there, unless others are asked for
GROUP_SIZES = (32, 64, 128)
_AT_LOAD = (64, 32)  # the largest that fits is taken where none is asked for
# Small, and what they add decides between near candidates
KEPT = ("candidate_selector", "markov_head", "confidence_head", "embed_proj")
_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")  # of experts, which they choose and weigh
MAX_BLOCK = 1024  # tokens; published drafters have 4 to 32
ACTIVATION = "silu"

_Config = TypeVar("_Config", bound="DraftConfig")


@dataclass(frozen=True)
class Quantization:
    """How matrices are packed; names as in the config.json of MLX folders."""

    group_size: int
    bits: int


def quantization(raw: Fields, name: str) -> Quantization | None:
    """How MLX has packed the weights, None where it has not."""
    given = raw.get(name)
    if given is None and raw.get("quantization_config") is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"quantization_config is {raw.get('quantization_config')!r}, not MLX's own"
        )
    if given.get("mode", "affine") != "affine":
        raise ValueError(f"quantization.mode is {given['mode']!r}")
    return Quantization(size(given, "group_size"), size(given, "bits"))


def stored(read: Callable[..., Any], default: Any = MISSING, **limits: Any) -> Any:
    """A field of a configuration that `read` finds in a config.json, by its own name there."""
    return field(default=default, metadata={"read": partial(read, **limits)})


def too_large(products: dict[str, int]) -> dict[str, Any]:
    """Products in words, each with whether MLX cannot have such a dimension."""
    return {
        f"{what} are more than {MAX_DIMENSION}": n > MAX_DIMENSION for what, n in products.items()
    }


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """What the config.json of every draft network says; names as there."""

    hidden_size: int = stored(size)
    intermediate_size: int = stored(size)
    num_attention_heads: int = stored(size)
    num_key_value_heads: int = stored(
        lambda raw, name: size(raw, name, size(raw, "num_attention_heads"))
    )
    head_dim: int = stored(head_dim)
    rms_norm_eps: float = stored(number, above=0)
    rope: dict[str, Any] = stored(rope)
    max_position_embeddings: int = stored(size)
    attention_bias: bool = stored(flag)
    # As in Qwen3.5: queries come with a gate of the attention's output; a part of each head turns
    gated: bool = False
    rotary_dims: int | None = None  # numbers of a head that turn, None for all
    # Per layer, None for full attention. A window of w reaches w - 1 positions back, and as many
    # ahead inside a block.
    layer_windows: tuple[int | None, ...] = stored(layer_windows)
    vocab_size: int = stored(size)  # the target's
    block_size: int = stored(whole)  # the anchor and the tokens that it drafts
    draft_vocab_size: int | None = None  # tokens that its own head knows, None for all
    aux_layers: tuple[int, ...] | None = ()  # target layers (0-based) whose outputs are read
    num_target_layers: int | None = None  # None where the file does not say
    final_logit_softcapping: float | None = None
    output_multiplier: float = 1.0  # of final states
    own_embedding: bool = stored(flag, False)  # else the target's
    own_head: bool = stored(flag, False)
    tied: bool = False  # whether its own head is its embedding
    quantization: Quantization | None = stored(quantization, None)  # of the weights in its files
    notes: tuple[str, ...] = stored(  # what reading or converting the file had to assume
        lambda raw, name: listed(raw.get(name) or [], name, str), ()
    )

    @classmethod
    def read(cls: type[_Config], raw: Fields, **known: Any) -> _Config:
        """From a config.json in our words. known: fields that are read otherwise."""
        if (activation := raw.get("hidden_act", ACTIVATION)) != ACTIVATION:
            raise ValueError(f"hidden_act is {activation!r}, supported is {ACTIVATION!r}")
        for own in fields(cls):
            if own.name not in known and "read" in own.metadata:
                known[own.name] = own.metadata["read"](raw, own.name)
        return cls(**known)

    @property
    def target_width(self) -> int | None:
        """`hidden_size` of the targets that it was made for, None for any."""
        return self.hidden_size

    @property
    def drafted(self) -> int:
        """Rows of a head of its own."""
        return self.draft_vocab_size or self.vocab_size

    def layers_read(self, layers: int) -> tuple[int, ...]:
        """The layers that it reads of a target with so many."""
        return self.aux_layers or ()

    def unreadable(self, layers: int) -> str:
        """Why it cannot read what it wants of a target with so many layers, "" where it can."""
        missing = [layer for layer in self.layers_read(layers) if not 0 <= layer < layers]
        return f"and no layer {missing[0]}" if missing else ""

    def problems(self) -> dict[str, Any]:
        """How fields contradict each other or MLX's limits, in words, each with whether they do."""
        heads, kv_heads, dim = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        products = {  # dimensions that MLX may be unable to have although each factor is one
            f"{heads} attention heads of {dim}": heads * dim,
            f"{kv_heads} key/value heads of {dim}": kv_heads * dim,
        }
        divided = f"{heads} attention heads do not divide by {kv_heads} key/value heads"
        return {divided: heads % kv_heads, **too_large(products)}

    def block_problems(
        self, mask: int | None = None, most: int = MAX_BLOCK, extra: int = 0
    ) -> dict[str, Any]:
        """Whether blocks are not of 2 to `most` tokens, or a mask is no token; as `problems`.

        extra: how much larger our block is than the one that the file tells.
        """
        block, vocabulary = self.block_size, self.vocab_size
        least = f"not from {2 - extra} to {most - extra}"
        found = {f"block_size is {block - extra}, {least}": not 2 <= block <= most}
        if mask is not None:
            words = f"mask_token_id is {mask}, outside the vocabulary of {vocabulary}"
            found[words] = not 0 <= mask < vocabulary
        return found


def quantize_network(network: nn.Module, bits: int, group_size: int | None = None) -> None:
    """Pack the matrices of a drafter network in place, lazily.

    Norms, routers of experts, DFlash 2's base kernels, its candidate selector, DSpark's and
    Domino's heads keep their numbers; so does what is packed already. bits: 4 or 8. group_size:
    numbers that share a scale and a bias, 32, 64 or 128; None for the larger of 64 and 32 that fits
    all of them. Raises DFlashError for other values, and where a matrix has rows of a length that
    the groups do not divide.
    """
    if bits not in BITS:
        raise DFlashError(f"bits of a quantised drafter is {bits!r}", f"choose one of {BITS}")
    if group_size not in (None, *GROUP_SIZES):
        raise DFlashError(
            f"group_size of a quantised drafter is {group_size!r}", f"choose one of {GROUP_SIZES}"
        )
    size = _group_size(network, group_size)
    nn.quantize(network, size, bits, class_predicate=_is_packed)


def pack_at_load(network: nn.Module, bits: int | None) -> None:
    """Pack the matrices of a network that is not packed yet. bits: `PairConfig.drafter_bits`.

    Raises as `quantize_network` does for what is asked for; what is not is done where it can be.
    """
    wanted = bits or (AS_STORED if cpu_math.applies() else ON_A_GPU)
    if wanted != AS_STORED:
        with suppress(*(() if bits else (DFlashError,))):
            quantize_network(network, wanted)


def quantization_of(network: nn.Module) -> Quantization | None:
    """How the network's matrices are packed, None where they are not."""
    for _, module in network.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            return Quantization(module.group_size, module.bits)
    return None


def _group_size(network: nn.Module, asked: int | None) -> int:
    rows = {p: m.weight.shape[-1] for p, m in network.named_modules() if _is_packed(p, m)}
    for length in _AT_LOAD if asked is None else (asked,):
        other = next((path for path, row in rows.items() if row % length), None)
        if other is None:
            return length
    way = "leave out --drafter-bits" if asked is None else "choose a smaller group_size"
    raise DFlashError(
        f"the drafter's {other} has rows of {rows[other]} numbers, which groups of {length} do not "
        "divide",
        way,
    )


def _is_packed(path: str, module: Any) -> bool:
    is_kept = path.endswith(_ROUTERS) or any(kept in path for kept in KEPT)
    return hasattr(module, "to_quantized") and not is_kept


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
    if not (file := folder / "config.json").exists():
        raise DFlashError(f"{folder} has no config.json", "give a drafter folder")
    return read_json_file(file, DOWNLOAD_AGAIN)


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
