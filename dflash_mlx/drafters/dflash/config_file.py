"""The config.json of z-lab's DFlash and DFlash 2 folders, and of ours, field by field.

Fields of the method are in `dflash_config`; older and newer files have some of them beside it.

Folders of vLLM's speculators library are told in these words. There the network lies under
`transformer_layer_config`, what makes it a drafter beside that. Tensors have z-lab's names;
embedding and head may be among them, and a reduced draft vocabulary with `d2t`.

`aux_hidden_state_layer_ids` number hidden states, the embedding's output as 0: id k is the output
of layer k - 1 (0-based), z-lab's `target_layer_ids` are one less. The library's own converter and
vLLM agree on that; a file alone cannot prove it, so reading one leaves a note of it. A file that
counts otherwise can say so: `dflash_config.target_layer_ids` in it is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from dflash_mlx.drafters.dflash.convolution import ConvolutionConfig
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.dflash.quantized import Quantization
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

VERSION_1, VERSION_2 = "DFlashDraftModel", "DFlash2DraftModel"
MAX_LAYERS = 1024  # published drafters have 5 to 8
MAX_BLOCK = 1024  # positions; published drafters have 4 to 16
ACTIVATION, PROJECTOR = "silu", "dflash"
_SPECULATORS = {"dflash": VERSION_1, "dflash2": VERSION_2}
_DFLASH_FIELDS = (
    "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "projector_type", "shift_label",
)  # fmt: skip

Fields = dict[str, Any]


def architecture(raw: Any) -> str:
    """What the config.json says that it describes."""
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return str(names[0])[:80] if isinstance(names, list) and names else "unknown"


def parse_fields(raw: Fields) -> NetworkConfig:
    """The configuration in a config.json of either version.

    Raises KeyError for a missing field, ValueError or TypeError for one of the wrong kind or size.
    """
    dflash = raw["dflash_config"]
    if not isinstance(dflash, dict):
        raise ValueError(f"dflash_config is {dflash!r}")
    _check_kind(raw, dflash)
    windows = _layer_windows(raw)
    if flag(dflash, "use_swa") and not any(windows):
        raise ValueError("dflash_config.use_swa is true, but layer_types has no sliding_attention")
    width, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    either, layers = {**raw, **dflash}, "num_target_layers"
    return NetworkConfig(
        hidden_size=width,
        intermediate_size=_size(raw, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=_size(raw, "num_key_value_heads", heads),
        head_dim=_size(raw, "head_dim", width // heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", above=0),
        rope=_rope(raw),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        layer_windows=windows,
        layer_causal=_layer_causal(raw, dflash, windows),
        attention_bias=flag(raw, "attention_bias"),
        block_size=_whole(either, "block_size"),
        mask_token_id=_whole(dflash, "mask_token_id"),
        target_layer_ids=_list(dflash["target_layer_ids"], "target_layer_ids", int),
        num_target_layers=None if raw[layers] is None else _size(raw, layers),
        vocab_size=_size(raw, "vocab_size"),
        input_embedding_scale=_number(dflash, "input_embedding_scale", 1.0, above=0),
        output_multiplier=_number(dflash, "output_multiplier", 1.0, above=0),
        final_logit_softcapping=_number(either, "final_logit_softcapping", 0.0) or None,
        draft_vocab_size=_size(raw, "draft_vocab_size", 0) or None,
        own_embedding=flag(dflash, "own_embedding"),
        own_head=flag(dflash, "own_head"),
        **(_second_version(either) if architecture(raw) == VERSION_2 else {}),
        quantization=_quantization(raw),
        notes=_list(raw.get("notes") or [], "notes", str),  # what a conversion assumed
    )


def problems(config: NetworkConfig) -> list[str]:
    """Why the fields contradict each other; empty where they do not."""
    width, dim, block = config.hidden_size, config.head_dim, config.block_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    taps, vocabulary, own = config.target_layer_ids, config.vocab_size, config.draft_vocab_size
    layers = max(*taps, 0) + 1 if config.num_target_layers is None else config.num_target_layers
    conv, selector = config.convolution or ConvolutionConfig(0, 1), config.selector
    top_k, groups = 0 if selector is None else selector.top_k, max(1, width // conv.group_size)
    products = {  # dimensions that MLX may be unable to have although each factor is one
        f"{heads} attention heads of {dim}": heads * dim,
        f"{kv_heads} key/value heads of {dim}": kv_heads * dim,
        f"{len(taps)} tapped layers of hidden_size {width}": len(taps) * width,
        f"two convolutions of conv_kernel_size {conv.kernel_size} over {groups} groups":
            2 * conv.kernel_size * groups,
    }  # fmt: skip
    found = {
        f"{heads} attention heads do not divide by {kv_heads} key/value heads": heads % kv_heads,
        f"block_size is {block}, not from 2 to {MAX_BLOCK}": not 2 <= block <= MAX_BLOCK,
        f"mask_token_id is {config.mask_token_id}, outside the vocabulary of {vocabulary}":
            not 0 <= config.mask_token_id < vocabulary,
        f"target_layer_ids are {list(taps)}, outside the {layers} layers of the target":
            not taps or not all(0 <= tap < layers for tap in taps),
        f"draft_vocab_size is {own}, not less than the vocabulary of {vocabulary}":
            own is not None and own >= vocabulary,
        f"draft_vocab_size is {own}, but own_head is false":
            own is not None and not config.own_head,
        f"draft_vocab_size is {own}, but the selector needs the vocabulary of {vocabulary}":
            own is not None and selector is not None,
        f"hidden_size {width} does not divide by conv_group_size {conv.group_size}":
            width % conv.group_size,
        f"conv_kernel_size is {conv.kernel_size}, more than the block_size {block}":
            conv.kernel_size > block,
        f"selector_top_k is {top_k}, more than the vocabulary of {vocabulary}": top_k > vocabulary,
        **{f"{what} are more than {MAX_DIMENSION}": size > MAX_DIMENSION
           for what, size in products.items()},
    }  # fmt: skip
    return [problem for problem, wrong in found.items() if wrong]


def _check_kind(raw: Fields, dflash: Fields) -> None:
    """Raise ValueError for another activation and for drafters that only look like this one."""
    if (activation := raw.get("hidden_act", ACTIVATION)) != ACTIVATION:
        raise ValueError(f"hidden_act is {activation!r}, supported is {ACTIVATION!r}")
    for fields in (raw, dflash):
        if (kind := fields.get("projector_type") or PROJECTOR) != PROJECTOR:
            raise ValueError(f"projector_type is {kind!r}, supported is {PROJECTOR!r}")
        if flag(fields, "shift_label"):
            raise ValueError(
                "shift_label is true, supported is false: only drafters that predict masks"
            )


def flag(raw: Fields, name: str, default: bool = False) -> bool:
    """A field that is true, false or absent; ValueError for anything else."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not true or false")
    return default if value is None else value


def _number(
    raw: Fields, name: str, default: float | None = None, above: float = -math.inf
) -> float:
    value: Any = raw[name] if default is None else raw.get(name)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value < math.inf:
        least = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{name} is {value!r}, not a finite number{least}")
    return value  # type: ignore[no-any-return]


def _whole(raw: Fields, name: str, default: int | None = None, least: float = -math.inf) -> int:
    if default is not None and raw.get(name) is None:
        return default
    value = _number(raw, name)
    if value != int(value) or not least <= value <= MAX_DIMENSION:
        lowest = "up" if least == -math.inf else f"from {least}"
        raise ValueError(f"{name} is {value!r}, not a whole number {lowest} to {MAX_DIMENSION}")
    return int(value)


def _size(raw: Fields, name: str, default: int | None = None) -> int:
    return _whole(raw, name, default, least=1)


def _list(given: Any, name: str, kind: type) -> tuple[Any, ...]:
    if not isinstance(given, list) or not all(type(each) is kind for each in given):
        raise ValueError(f"{name} are {given!r}")
    return tuple(given)


def _rope(raw: Fields) -> dict[str, Any]:
    """`rope_parameters` (newer files), or rope_theta beside an optional `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope_parameters are {given!r}")
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} of the rope is {value!r}, not a finite number")
    rope = dict(given)
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    _number(rope, "rope_theta", above=0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _layer_windows(raw: Fields) -> tuple[int | None, ...]:
    if (layers := _size(raw, "num_hidden_layers")) > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    types = raw.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers:
        raise ValueError(f"layer_types: {len(types)} entries for {layers} layers")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types holds {unknown.pop()!r}")
    return tuple(_size(raw, "sliding_window") if t == "sliding_attention" else None for t in types)


def _layer_causal(raw: Fields, dflash: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal` for all layers, or `causal` as vLLM has it; else sliding layers alone are."""
    given, name = (dflash, "causal") if raw.get("is_causal") is None else (raw, "is_causal")
    return tuple(flag(given, name, default=window is not None) for window in windows)


def _second_version(fields: Fields) -> dict[str, Any]:
    taps, group = _size(fields, "conv_kernel_size"), _size(fields, "conv_group_size")
    rank, top_k = _size(fields, "selector_rank"), _size(fields, "selector_top_k")
    return {"convolution": ConvolutionConfig(taps, group), "selector": SelectorConfig(rank, top_k)}


def _quantization(raw: Fields) -> Quantization | None:
    given = raw.get("quantization")
    if given is None and raw.get("quantization_config") is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"quantization_config is {raw.get('quantization_config')!r}, not MLX's own"
        )
    if given.get("mode", "affine") != "affine":
        raise ValueError(f"quantization.mode is {given['mode']!r}")
    return Quantization(_size(given, "group_size"), _size(given, "bits"))


def is_speculators(raw: Any) -> bool:
    """Whether a config.json's contents are of the speculators library."""
    return isinstance(raw, dict) and "speculators_model_type" in raw


def translate(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A drafter's config.json in z-lab's format; one that is in it already stays as it is.

    names: of the tensors in its files; () where these are not known. Raises ValueError for a
    speculators drafter of another kind, KeyError for a missing field.
    """
    if not is_speculators(raw):
        return raw
    kind = raw["speculators_model_type"]
    if kind not in _SPECULATORS:
        known = ", ".join(_SPECULATORS)
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
    result = {**layers, "architectures": [_SPECULATORS[kind]], "block_size": raw["block_size"]}
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
