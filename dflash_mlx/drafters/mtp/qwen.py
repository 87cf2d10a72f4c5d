"""Heads of Qwen3-Next and of Qwen3.5 to 3.8, dense and with experts.

Sources: vLLM's `qwen3_next_mtp.py` and `qwen3_5_mtp.py` for the network, mlx-vlm's `qwen3_5_mtp`
for split folders. Both give the head the target's states behind its last norm, and its own behind
its own.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import mlx.core as mx

from dflash_mlx.drafters.mtp.kinds import Kind
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
    """`mtp.*` beside the target's tensors; norms of the published ones are stored as weight - 1.

    mlx-lm adds the 1 to a target's and drops the head, other converters keep the head with it or
    without. Only the numbers tell, and only those of the layer: the means of the other norms
    overlap.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_moe")
    count = "mtp_num_hidden_layers"
    dedicated = "mtp_use_dedicated_embeddings"
    one_layer = {"full_attention_interval": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}

    def heads(self, text: Fields) -> int:
        count = super().heads(text)
        if count > 1:
            raise ValueError(f"{self.count} is {count}, supported is 1")
        return count

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
