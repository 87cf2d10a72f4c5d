"""Heads as they lie in their targets' checkpoints, one class a family of targets.

The layers are those of mlx-lm's module of the family, which also arranges the tensors of all but
Qwen's: it stacks experts, splits projections of latent keys and values, and unpacks DeepSeek's
8-bit floats.

Embedding and head are the target's, whatever copies a checkpoint has beside its layer: that they
are the same says DeepSeek's README_WEIGHTS.md, and SGLang (`deepseek_nextn.py`) and transformers
(`MtpModel`) leave them out. vLLM (`deepseek_mtp.py`, `mimo_mtp.py`) sets the embedding of the row
at position 0 to nothing, which neither these two nor the publishers' own modules do, nor do we.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx

from dflash_mlx.core.errors import in_one_line
from dflash_mlx.drafters.mtp.kinds import Kind, model_type
from dflash_mlx.drafters.networks.fields import Fields
from dflash_mlx.drafters.networks.files import Arrays

_NAME = re.compile(r"(?:model\.|language_model\.)*mtp\.(.+)")
_EXPERT = re.compile(r"(.+\.)experts\.(\d+)\.((?:gate|up|down)_proj\.\w+)")
_FUSED = re.compile(r"(.+\.)experts\.(gate_up|down)_proj(?:\.weight)?")
_LAYER = "layers.0."
_HEADS = (f"{_LAYER}self_attn.q_norm.weight", f"{_LAYER}self_attn.k_norm.weight")
_ROWS = (f"{_LAYER}input_layernorm.weight", f"{_LAYER}post_attention_layernorm.weight")
# Between the means of norms stored as weight - 1 and as they are, of all heads that MTPLX's tests
# list (`test_mtp_norm_convention`): 0.73 to 0.79 and 1.73 to 1.79; 0.04 to 0.39 and 0.87 to 1.21
_BETWEEN = {_HEADS: 1.25, _ROWS: 0.63}


class Qwen(Kind):
    """Qwen3.5 to 3.8, dense and with experts: `mtp.*` beside the target's tensors.

    Sources: vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py` for the network, mlx-vlm's
    `qwen3_5_mtp` for split folders. Both give the head the target's states behind its last norm,
    and its own behind its own. Norms of the published ones are stored as weight - 1.

    mlx-lm adds the 1 to a target's and drops the head, other converters keep the head with it or
    without. Only the numbers tell, and only those of the layer: the means of the other norms
    overlap.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_moe")
    count = "mtp_num_hidden_layers"
    dedicated = "mtp_use_dedicated_embeddings"
    one_layer = {"full_attention_interval": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}

    def our_name(self, name: str, text: Fields) -> str | None:
        found = _NAME.fullmatch(name)
        return found[1] if found else None

    def arranged(self, tensors: Arrays, text: Fields) -> Arrays:
        """With the matrices of all experts in one, as mlx-lm's module has them."""
        found: dict[str, Any] = {}
        experts: dict[str, dict[int, mx.array]] = {}
        for name, array in tensors.items():
            if match := _EXPERT.fullmatch(name):
                place = f"{match[1]}switch_mlp.{match[3]}"
                experts.setdefault(place, {})[int(match[2])] = array
            elif match := _FUSED.fullmatch(name):
                found |= _split(f"{match[1]}switch_mlp.", match[2], array)
            else:
                found[name] = array
        for place, parts in experts.items():
            missing = set(range(len(parts))) - parts.keys()
            if missing:
                raise ValueError(f"expert {min(missing)} of {place} is missing")
            found[place] = mx.stack([parts[i] for i in range(len(parts))])
        return found

    def finished(self, tensors: Arrays, text: Fields) -> Arrays:
        means = {
            names: float(mx.concatenate([tensors[n].astype(mx.float32) for n in names]).mean())
            for names in _BETWEEN
        }
        below = {means[names] < limit for names, limit in _BETWEEN.items()}
        if len(below) > 1:
            heads, rows = means.values()
            raise ValueError(
                f"its norms of heads are {heads:.2f} in the mean and those of rows {rows:.2f}, so "
                "some are stored as weight - 1 and some are not"
            )
        if not below.pop():
            return tensors
        return {n: a + 1 if n.endswith("norm.weight") or "_norm_" in n else a
                for n, a in tensors.items()}  # fmt: skip


class QwenNext(Qwen):
    """Qwen3-Next, whose published files have a head and no count, for which vLLM takes 1."""

    model_types = ("qwen3_next",)

    def heads(self, text: Fields) -> int:
        return 1 if text.get(self.count) is None else super().heads(text)


def _split(place: str, which: str, array: mx.array) -> Arrays:
    """Of matrices [E, out, in]; gate and up stand one behind the other."""
    if which == "down":
        return {f"{place}down_proj.weight": array}
    if array.ndim != 3 or array.shape[1] % 2:
        raise ValueError(f"{place}gate_up_proj is {array.shape}")
    gate, up = mx.split(array, 2, axis=1)
    return {f"{place}gate_proj.weight": gate, f"{place}up_proj.weight": up}


_OURS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_BLOCKS = {"full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}


class Arranged(Kind):
    """Tensors that mlx-lm's module of the family arranges."""

    count = "num_nextn_predict_layers"
    place: ClassVar[str] = "model."  # of the layers in a model of the family
    around: ClassVar[tuple[str, ...]]  # what is named as in `_OURS` here, in that order
    left: ClassVar[str] = r"rotary_emb\.inv_freq"  # what nobody reads
    # How the names of a head's tensors begin; {} is the number of the target's layers
    starts: ClassVar[tuple[str, ...]] = ("mtp.",)
    layer: ClassVar[str] = ""  # what ours have before the name of one in a layer

    def our_name(self, name: str, text: Fields) -> str | None:
        starts = (start.format(text.get("num_hidden_layers")) for start in self.starts)
        prefix = next(filter(name.startswith, starts), None)
        if prefix is None or re.search(self.left, name):
            return None
        module, _, tensor = (rest := name.removeprefix(prefix)).rpartition(".")
        for theirs, ours in zip(self.around, _OURS, strict=True):
            if f".{module}".endswith(f".{theirs}"):
                return f"{ours}.{tensor}"
        return self.layer + rest

    def arranged(self, tensors: Arrays, text: Fields) -> Arrays:
        model = self.make_model(text)
        try:
            found = model.sanitize({self.place + name: array for name, array in tensors.items()})
        except KeyError as error:
            name = str(error.args[0]).removeprefix(self.place)
            raise ValueError(f"tensor {name} is missing") from None
        except Exception as error:  # of mlx-lm's classes, which check little
            what = f"mlx-lm cannot arrange the tensors of the head ({in_one_line(error)})"
            raise ValueError(what) from None
        return {name.removeprefix(self.place): array for name, array in found.items()}


class Glm(Arranged):
    """GLM 4.5 to 4.7: a layer with experts behind the target's last one, as DeepSeek's.

    SGLang (`deepseek_nextn.py`), transformers (`MtpModel`) and vLLM since it was mended
    (`deepseek_mtp.py`) read the target's states behind its last norm, and feed what stands behind
    the head's. That the layer has experts is from transformers' `get_mtp_config`.
    """

    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    one_layer: ClassVar[Mapping[str, Any]] = {"first_k_dense_replace": 0}
    around = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    layer = "layers.0."
    left = rf"{Arranged.left}|\.embed_tokens\.|\.shared_head\.head\."
    starts: ClassVar[tuple[str, ...]] = ("model.layers.{}.",)


class DeepSeek(Glm):
    """DeepSeek V3, and GLM-4-MoE-lite: as GLM's, with latent keys and values."""

    model_types = ("deepseek_v3", "glm4_moe_lite")
    starts = (*Glm.starts, "model.mtp_block.")
    array_masks = True
    split: ClassVar[Mapping[str, str]] = {  # names in mlx-vlm's folders, `glm4_moe_lite_mtp`
        **{f"model.{name}": ours for name, ours in zip(Glm.around[:3], _OURS[:3], strict=True)},
        "model.shared_head_norm": _OURS[3],
    }

    def our_name(self, name: str, text: Fields) -> str | None:
        module, _, tensor = name.rpartition(".")
        if module in self.split:
            return f"{self.split[module]}.{tensor}"
        return super().our_name(name, text)


class MiMo(Arranged):
    """MiMo: Qwen2's layer, read as the publisher's branch of vLLM does (`mimo_mtp.py`, `mimo.py`).

    The state's half comes first, and it is the state before the target's last norm. One token is
    drafted there; for more, what stands before the head's own norm is fed (exllamav3's MiMo).
    """

    model_types = ("mimo",)
    variant: ClassVar[Mapping[str, Any]] = {
        "hidden_first": True,
        "hidden_normed": False,
        "feeds_normed": False,
        "block_size": 2,
    }
    starts = ("model.mtp_layers.0.",)
    around = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    layer = "layers.0."


class Exaone(Arranged):
    """K-EXAONE: by the names of Qwen's (vLLM's `exaone_moe_mtp.py`), a dense layer that sees all.

    That it is so says TensorRT-LLM (`modeling_exaone_moe.py`), and newer files `mtp_layer_types`.
    Where the target has sliding windows, such a layer goes without positions.
    """

    model_types = ("exaone_moe",)
    around = _OURS

    def arguments(self, text: Fields) -> Fields:
        kinds = ["full_attention", *(text.get("layer_types") or [])]
        return {**super().arguments(text), "layer_types": kinds, "is_moe_layer": [False]}


class NemotronH(Arranged):
    """Nemotron-H: blocks by a pattern, of attention and experts (vLLM's `nemotron_h_mtp.py`)."""

    model_types = ("nemotron_h",)
    place = "backbone."
    eps = ("layer_norm_epsilon",)
    around = ("enorm", "hnorm", "eh_proj", "final_layernorm")

    def pattern(self, text: Fields) -> str:
        """The blocks of a head, a letter each."""
        given = text.get("mtp_hybrid_override_pattern")
        if given is None:
            kinds = text.get("mtp_layers_block_type") or ["full_attention", "moe"]
            given = "".join(_BLOCKS.get(kind, "?") for kind in kinds)
        if not isinstance(given, str) or given[:1] != "*" or set(given[1:]) - set("E-"):
            raise ValueError(
                f"mtp_hybrid_override_pattern is {given!r}, supported is attention (*) with "
                "experts (E) or an MLP (-) after it"
            )
        return given

    def arguments(self, text: Fields) -> Fields:
        other = {"layers_block_type": None, "layer_types": None}
        pattern = {"hybrid_override_pattern": list(self.pattern(text))}
        return {**super().arguments(text), **other, **pattern}

    def keeps(self, layer: Any) -> bool:
        return bool(layer.block_type == "*")


class Unread(Kind):
    """Heads that are known and not read, each with the reason."""

    count = "num_nextn_predict_layers"
    reasons: ClassVar[Mapping[str, str]] = {
        "mimo_v2_flash": "they have sliding windows and attention sinks, one for each step",
        "step3p5": "there is one for each step",
        "ernie4_5_moe": "how their layer rotates positions is not known",
        "bailing_hybrid": "programs differ in the norms before its vocabulary matrix",
        "bailing_moe_v3": "they were never tried",
        "joyai_llm_flash": "they were never tried",
        "mellum": "they have sliding windows",
        "longcat_flash": "nor are their targets",
        "deepseek_v32": "nor are their targets",
        "glm_moe_dsa": "nor are their targets",
    }
    model_types = tuple(reasons)

    def refusal(self, text: Fields) -> str:
        own = model_type(text)
        return f"model_type is {own}, whose heads are not read: {self.reasons[own]}"
