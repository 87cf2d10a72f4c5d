"""Reading DFlash v1 drafter folders; everything is checked before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from dflash_mlx.drafters.network import Network, NetworkConfig
from dflash_mlx.errors import DFlashError

_DOWNLOAD_AGAIN = "download the drafter again, or choose another one with --drafter"


class Header(NamedTuple):
    """What a safetensors file says of a tensor before its numbers are read."""

    floating: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.shape}" if self.floating else f"{self.shape} of whole numbers"


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
    return parse_config(raw, str(folder))


def parse_config(raw: Any, source: str) -> NetworkConfig:
    """The configuration in a config.json's contents. source: where they are from, for messages.

    Raises DFlashError as `read_config` does.
    """
    if (kind := _architecture(raw)) != "DFlashDraftModel":
        raise DFlashError(
            f"{source} holds a {kind}, not a DFlashDraftModel",
            "give a DFlash v1 drafter folder with --drafter",
        )
    try:
        config = _parse(raw)
    except KeyError as error:
        raise DFlashError(f"config.json of {source} lacks {error}", _DOWNLOAD_AGAIN) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise DFlashError(f"in {source}/config.json, {error}", _DOWNLOAD_AGAIN) from None
    _check_consistent(config, source)
    return config


def _architecture(raw: Any) -> str:
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return str(names[0]) if isinstance(names, list) and names else "unknown"


def _parse(raw: dict[str, Any]) -> NetworkConfig:
    """Raises KeyError for a missing field, ValueError for one of the wrong kind or size."""
    dflash = raw["dflash_config"]
    if not isinstance(dflash, dict):
        raise ValueError(f"dflash_config is {dflash!r}")
    windows = _layer_windows(raw)
    width, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    return NetworkConfig(
        hidden_size=width,
        intermediate_size=_size(raw, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=_size(raw, "num_key_value_heads", heads),
        head_dim=_size(raw, "head_dim", width // heads),
        rms_norm_eps=_number(raw, "rms_norm_eps"),
        rope=_rope(raw),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        layer_windows=windows,
        layer_causal=_layer_causal(raw, windows),
        attention_bias=bool(raw.get("attention_bias", False)),
        block_size=_whole(dflash if "block_size" in dflash else raw, "block_size"),
        mask_token_id=_whole(dflash, "mask_token_id"),
        target_layer_ids=_taps(dflash),
        num_target_layers=_size(raw, "num_target_layers"),
        vocab_size=_size(raw, "vocab_size"),
        input_embedding_scale=_number(dflash, "input_embedding_scale", 1.0),
        output_multiplier=_number(dflash, "output_multiplier", 1.0),
        final_logit_softcapping=_number(dflash, "final_logit_softcapping", 0.0) or None,
    )


def _number(raw: dict[str, Any], name: str, default: float | None = None) -> float:
    value = raw[name] if default is None else raw.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}")
    return value


def _whole(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _number(raw, name, default)
    if value != int(value):
        raise ValueError(f"{name} is {value!r}")
    return int(value)


def _size(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _whole(raw, name, default)
    if value < 1:
        raise ValueError(f"{name} is {value!r}")
    return value


def _taps(dflash: dict[str, Any]) -> tuple[int, ...]:
    taps = dflash["target_layer_ids"]
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise ValueError(f"target_layer_ids are {taps!r}")
    return tuple(taps)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (newer files), or rope_theta beside an optional `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope_parameters are {given!r}")
    rope = dict(given)
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    layers = _size(raw, "num_hidden_layers")
    types = raw.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers:
        raise ValueError(f"layer_types: {len(types)} entries for {layers} layers")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types holds {unknown.pop()!r}")
    return tuple(_size(raw, "sliding_window") if t == "sliding_attention" else None for t in types)


def _layer_causal(raw: dict[str, Any], windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal` for all layers; where it is absent, sliding layers are causal, full ones not."""
    is_causal = raw.get("is_causal")
    return tuple(w is not None if is_causal is None else bool(is_causal) for w in windows)


def _check_consistent(config: NetworkConfig, source: str) -> None:
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
            raise DFlashError(f"in {source}, {problem}", _DOWNLOAD_AGAIN)


def check_fit(config: NetworkConfig, target: dict[str, Any], name: str) -> None:
    """Raise DFlashError unless the drafter was made for a target with this configuration.

    target: `hidden_size`, `vocab_size` and `num_hidden_layers` as in the target's config.json.
    """
    pairs = {
        "hidden_size": (config.hidden_size, target.get("hidden_size")),
        "vocab_size": (config.vocab_size, target.get("vocab_size")),
        "number of target layers": (config.num_target_layers, target.get("num_hidden_layers")),
    }
    for field, (drafter_value, target_value) in pairs.items():
        if drafter_value != target_value:
            raise DFlashError(
                f"the drafter was made for a target with {field} {drafter_value}, "
                f"but {name} has {target_value}",
                "choose the drafter of this model with --drafter, or --method none",
            )


def check_block_size(block_size: int | None, config: NetworkConfig) -> None:
    """Raise DFlashError unless the drafter can draft blocks of `block_size` (None: its own)."""
    if block_size is not None and not 2 <= block_size <= config.block_size:
        raise DFlashError(
            f"block_size is {block_size}, but this drafter was trained for blocks of "
            f"{config.block_size}",
            f"choose 2 to {config.block_size}",
        )


def load_network(folder: Path, config: NetworkConfig, dtype: mx.Dtype) -> Network:
    """The drafter's weights from the safetensors files of `folder`, cast to `dtype`.

    Raises DFlashError, before any weight is read, for damaged files and for missing, unexpected or
    misshapen tensors.
    """
    try:
        network = Network(config)
    except (ValueError, KeyError) as error:
        raise DFlashError(
            f"the rope in {folder} is {config.rope}, which mlx-lm refuses ({error})",
            _DOWNLOAD_AGAIN,
        ) from None
    files = sorted(folder.glob("*.safetensors"))
    parameters: list[tuple[str, mx.array]] = tree_flatten(network.parameters())  # type: ignore[assignment]
    wanted = {name: Header(True, tuple(array.shape)) for name, array in parameters}
    _check_tensors(folder, _headers(files), wanted)
    for file in files:
        network.load_weights(str(file), strict=False)
    network.set_dtype(dtype)
    mx.eval(network.parameters())
    return network


def _headers(files: list[Path]) -> dict[str, Header]:
    """All tensors, from the heads of the files alone."""
    headers: dict[str, Header] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    part = tensors.get_slice(name)
                    floating = part.get_dtype() in ("F32", "F16", "BF16")
                    headers[name] = Header(floating, tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise DFlashError(f"{file} is damaged ({error})", _DOWNLOAD_AGAIN) from None
    return headers


def _check_tensors(folder: Path, found: dict[str, Header], wanted: dict[str, Header]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        has, needs = found.get(name, "missing"), wanted.get(name, "no such tensor")
        if has != needs:
            raise DFlashError(
                f"tensor {name} in {folder} is {has}, but its config.json asks for {needs}",
                _DOWNLOAD_AGAIN,
            )
