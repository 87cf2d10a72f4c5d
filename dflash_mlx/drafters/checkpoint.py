"""Reading DFlash v1 drafter folders; everything is checked before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.errors import DFlashError

Shapes = dict[str, tuple[int, ...]]

_DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"


def read_config(folder: Path) -> NetworkConfig:
    """The drafter's configuration from `folder`/config.json.

    Raises DFlashError when the file is missing, damaged, incomplete, inconsistent or describes
    another kind of drafter.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlashError(f"{folder} has no config.json", "give a drafter folder") from None
    except (ValueError, OSError) as error:
        raise DFlashError(f"{file} cannot be read ({error})", _DOWNLOAD_AGAIN) from None
    kind = (raw.get("architectures") or ["unknown"])[0] if isinstance(raw, dict) else "unknown"
    if kind != "DFlashDraftModel":
        raise DFlashError(
            f"{folder} holds a {kind}, not a DFlashDraftModel",
            "give a DFlash v1 drafter folder with --drafter",
        )
    try:
        config = _parse(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise DFlashError(f"{file} lacks or garbles {error}", _DOWNLOAD_AGAIN) from None
    _check_consistent(config, folder)
    return config


def _parse(raw: dict[str, Any]) -> NetworkConfig:
    dflash = raw["dflash_config"]
    heads = int(raw["num_attention_heads"])
    return NetworkConfig(
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=_rope(raw),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        layer_windows=(windows := _layer_windows(raw)),
        layer_causal=_layer_causal(raw, windows),
        attention_bias=bool(raw.get("attention_bias", False)),
        block_size=int(dflash.get("block_size") or raw["block_size"]),
        mask_token_id=int(dflash["mask_token_id"]),
        target_layer_ids=tuple(int(i) for i in dflash["target_layer_ids"]),
        num_target_layers=int(raw["num_target_layers"]),
        vocab_size=int(raw["vocab_size"]),
        input_embedding_scale=float(dflash.get("input_embedding_scale", 1.0)),
        output_multiplier=float(dflash.get("output_multiplier", 1.0)),
        final_logit_softcapping=dflash.get("final_logit_softcapping"),
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (newer files), or rope_theta beside an optional `rope_scaling`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    layers = int(raw["num_hidden_layers"])
    types = raw.get("layer_types") or ["full_attention"] * layers
    known = {"full_attention": None, "sliding_attention": raw.get("sliding_window")}
    windows = tuple(known[t] for t in types)
    if len(windows) != layers:
        raise ValueError(f"layer_types: {len(windows)} entries for {layers} layers")
    if "sliding_attention" in types and not raw.get("sliding_window"):
        raise KeyError("sliding_window")
    return windows


def _layer_causal(raw: dict[str, Any], windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal` for all layers; where it is absent, sliding layers are causal, full ones not."""
    is_causal = raw.get("is_causal")
    return tuple(w is not None if is_causal is None else bool(is_causal) for w in windows)


def _check_consistent(config: NetworkConfig, folder: Path) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layers, taps = config.num_target_layers, config.target_layer_ids
    problems = {
        f"{heads} attention heads do not divide by {kv_heads} key/value heads": heads % kv_heads,
        f"block_size is {config.block_size}": config.block_size < 2,
        f"mask_token_id is {config.mask_token_id}, outside the vocabulary of {config.vocab_size}":
            not 0 <= config.mask_token_id < config.vocab_size,
        f"target_layer_ids are {list(taps)}, outside the {layers} layers of the target":
            not taps or not all(0 <= tap < layers for tap in taps),
    }  # fmt: skip
    for problem, found in problems.items():
        if found:
            raise DFlashError(f"in {folder}, {problem}", _DOWNLOAD_AGAIN)


def check_fit(config: NetworkConfig, target: dict[str, Any], name: str) -> None:
    """Raise DFlashError unless the drafter was made for a target with this configuration.

    target: `hidden_size`, `vocab_size` and `num_hidden_layers` as in the target's config.json.
    """
    pairs = {
        "hidden_size": (config.hidden_size, target["hidden_size"]),
        "vocab_size": (config.vocab_size, target["vocab_size"]),
        "number of target layers": (config.num_target_layers, target["num_hidden_layers"]),
    }
    for field, (drafter_value, target_value) in pairs.items():
        if drafter_value != target_value:
            raise DFlashError(
                f"the drafter was made for a target with {field} {drafter_value}, "
                f"but {name} has {target_value}",
                "choose the drafter of this model with --drafter, or --method none",
            )


def load_network(folder: Path, config: NetworkConfig, dtype: mx.Dtype) -> Network:
    """The drafter's weights from the safetensors files of `folder`, cast to `dtype`.

    Raises DFlashError, before any weight is read, for damaged files and for missing, unexpected or
    misshapen tensors.
    """
    network = Network(config)
    files = sorted(folder.glob("*.safetensors"))
    wanted = {name: tuple(array.shape) for name, array in tree_flatten(network.parameters())}
    _check_tensors(folder, _shapes(files), wanted)
    weights = {name: array for file in files for name, array in mx.load(str(file)).items()}
    network.load_weights(list(weights.items()))
    network.set_dtype(dtype)
    mx.eval(network.parameters())
    return network


def _shapes(files: list[Path]) -> Shapes:
    """Names and shapes of all tensors, from the file headers."""
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                names = tensors.keys()
                shapes |= {k: tuple(tensors.get_slice(k).get_shape()) for k in names}
        except (SafetensorError, OSError) as error:
            raise DFlashError(f"{file} is damaged ({error})", _DOWNLOAD_AGAIN) from None
    return shapes


def _check_tensors(folder: Path, found: Shapes, wanted: Shapes) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        has, needs = found.get(name, "missing"), wanted.get(name, "no such tensor")
        if has != needs:
            raise DFlashError(
                f"tensor {name} in {folder} is {has}, but its config.json asks for {needs}",
                _DOWNLOAD_AGAIN,
            )
