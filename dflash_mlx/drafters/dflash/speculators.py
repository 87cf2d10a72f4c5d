"""Drafter folders of vLLM's speculators library, told in the words of z-lab's format.

The network lies under `transformer_layer_config`, what makes it a drafter beside that. Tensors have
z-lab's names; embedding and head may be among them, and a reduced draft vocabulary with `d2t`.

`aux_hidden_state_layer_ids` number hidden states, the embedding's output as 0: id k is the output
of layer k - 1 (0-based), z-lab's `target_layer_ids` are one less. The library's own converter and
vLLM agree on that; a file alone cannot prove it, so reading one leaves a note of it. A file that
counts otherwise can say so: `dflash_config.target_layer_ids` in it is taken as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflash_mlx.drafters.dflash.config_file import flag

_TYPES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_DFLASH_FIELDS = (
    "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "projector_type", "shift_label",
)  # fmt: skip


def is_speculators(raw: Any) -> bool:
    """Whether a config.json's contents are of this format."""
    return isinstance(raw, dict) and "speculators_model_type" in raw


def translate(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The same drafter's config.json in z-lab's format.

    names: of the tensors in its files; () where these are not known. Raises ValueError for a
    drafter of another kind, KeyError for a missing field.
    """
    kind = raw["speculators_model_type"]
    if kind not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(f"speculators_model_type is {kind!r}, not supported; {known} are")
    layers = raw["transformer_layer_config"]
    if not isinstance(layers, dict):
        raise ValueError(f"transformer_layer_config is {layers!r}")
    width, target_width = layers["hidden_size"], raw.get("target_hidden_size")
    if target_width not in (None, width):
        raise ValueError(
            f"target_hidden_size is {target_width!r} and hidden_size {width!r}; a drafter of "
            "another width than its target's is not supported"
        )
    if flag(raw, "sample_from_anchor"):
        raise ValueError("sample_from_anchor is true, supported are drafters that predict masks")
    result = {**layers, "architectures": [_TYPES[kind]], "block_size": raw["block_size"]}
    result["num_target_layers"] = raw.get("num_target_layers")
    method, notes = _dflash_config(raw)
    result |= {"dflash_config": method, "notes": notes}
    if flag(raw, "sliding_window_non_causal", default=kind == "dflash2"):
        result["is_causal"] = False
    rope = layers.get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:
        result["rope_parameters"] = rope["sliding_attention"]  # as the library itself does
    if (size := raw.get("draft_vocab_size")) not in (None, layers["vocab_size"]):
        result["draft_vocab_size"] = size
    method["own_embedding"] = "embed_tokens.weight" in names
    method["own_head"] = "draft_vocab_size" in result or "lm_head.weight" in names
    return result


def _dflash_config(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of the method, and a note of what had to be assumed."""
    given: dict[str, Any] = {k: raw[k] for k in _DFLASH_FIELDS if raw.get(k) is not None}
    method = raw.get("dflash_config") or {}
    if not isinstance(method, dict):
        raise ValueError(f"dflash_config is {method!r}")
    given.update(method)
    if "target_layer_ids" in given:
        return given, []
    ids = raw["aux_hidden_state_layer_ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i > 0 for i in ids):
        raise ValueError(
            f"aux_hidden_state_layer_ids are {ids!r}; they number hidden states from the output of "
            "the embedding, 0, which no drafter reads (if these number layers, add them as "
            "dflash_config.target_layer_ids)"
        )
    taps = [i - 1 for i in ids]
    note = f"aux_hidden_state_layer_ids {ids} are taken to number hidden states, so the drafter "
    note += f"reads the outputs of layers {taps}, counted from 0"
    return {**given, "target_layer_ids": taps}, [note]
