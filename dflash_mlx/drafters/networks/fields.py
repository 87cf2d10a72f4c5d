"""Fields of a config.json, each checked when it is read.

KeyError for a missing field, ValueError or TypeError for one of the wrong kind or size.
"""

from __future__ import annotations

import math
from typing import Any

from dflash_mlx.drafters.networks.layers import Shape
from dflash_mlx.drafters.networks.quantized import Quantization
from dflash_mlx.system.safetensors_header import MAX_DIMENSION

MAX_LAYERS = 1024  # published drafters have 1 to 8
ACTIVATION = "silu"

Fields = dict[str, Any]


def architecture(raw: Any) -> str:
    """What the config.json says that it describes."""
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return str(names[0])[:80] if isinstance(names, list) and names else "unknown"


def flag(raw: Fields, name: str, default: bool = False) -> bool:
    """A field that is true, false or absent; ValueError for anything else."""
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not true or false")
    return default if value is None else value


def number(raw: Fields, name: str, default: float | None = None, above: float = -math.inf) -> float:
    """A finite number above `above`; `default` where the field is absent and that is given."""
    value: Any = raw[name] if default is None else raw.get(name)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value < math.inf:
        least = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{name} is {value!r}, not a finite number{least}")
    return value  # type: ignore[no-any-return]


def whole(raw: Fields, name: str, default: int | None = None, least: float = -math.inf) -> int:
    """A whole number from `least` to what MLX can have of anything."""
    if default is not None and raw.get(name) is None:
        return default
    value = number(raw, name)
    if value != int(value) or not least <= value <= MAX_DIMENSION:
        lowest = "up" if least == -math.inf else f"from {least}"
        raise ValueError(f"{name} is {value!r}, not a whole number {lowest} to {MAX_DIMENSION}")
    return int(value)


def size(raw: Fields, name: str, default: int | None = None) -> int:
    """A whole number from 1 on."""
    return whole(raw, name, default, least=1)


def listed(given: Any, name: str, kind: type) -> tuple[Any, ...]:
    """A list of values of one kind."""
    if not isinstance(given, list) or not all(type(each) is kind for each in given):
        raise ValueError(f"{name} are {given!r}")
    return tuple(given)


def rope(raw: Fields) -> dict[str, Any]:
    """`rope_parameters` (newer files), or rope_theta beside an optional `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope_parameters are {given!r}")
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} of the rope is {value!r}, not a finite number")
    result = dict(given)
    result.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    number(result, "rope_theta", above=0)
    result.setdefault("rope_type", result.get("type", "default"))
    if not flag(raw, "rope_is_neox_style", default=True):
        result["interleaved"] = True
    return result


def shape(raw: Fields) -> Fields:
    """The fields of `layers.Shape`."""
    width, heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
    return {
        "hidden_size": width,
        "intermediate_size": size(raw, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": size(raw, "num_key_value_heads", heads),
        "head_dim": size(raw, "head_dim", width // heads),
        "rms_norm_eps": number(raw, "rms_norm_eps", above=0),
        "rope": rope(raw),
        "max_position_embeddings": size(raw, "max_position_embeddings"),
        "attention_bias": flag(raw, "attention_bias"),
    }


def shape_problems(shape: Shape) -> dict[str, Any]:
    """Contradictions of a shape in words, each with whether it holds."""
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    products = {  # dimensions that MLX may be unable to have although each factor is one
        f"{heads} attention heads of {dim}": heads * dim,
        f"{kv_heads} key/value heads of {dim}": kv_heads * dim,
    }
    divided = f"{heads} attention heads do not divide by {kv_heads} key/value heads"
    return {divided: heads % kv_heads, **too_large(products)}


def too_large(products: dict[str, int]) -> dict[str, Any]:
    """Products in words, each with whether MLX cannot have such a dimension."""
    return {
        f"{what} are more than {MAX_DIMENSION}": n > MAX_DIMENSION for what, n in products.items()
    }


def layer_count(raw: Fields) -> int:
    """num_hidden_layers, as many as a draft model can have."""
    if (layers := size(raw, "num_hidden_layers")) > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    return layers


def layer_windows(raw: Fields) -> tuple[int | None, ...]:
    """The sliding window of every layer, None for full attention; by layer_types, if given."""
    layers = layer_count(raw)
    types = raw.get("layer_types") or ["full_attention"] * layers
    if len(types) != layers:
        raise ValueError(f"layer_types: {len(types)} entries for {layers} layers")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types holds {unknown.pop()!r}")
    return tuple(size(raw, "sliding_window") if t == "sliding_attention" else None for t in types)


def check_activation(raw: Fields) -> None:
    """ValueError for another activation than `layers.MLP` has."""
    if (activation := raw.get("hidden_act", ACTIVATION)) != ACTIVATION:
        raise ValueError(f"hidden_act is {activation!r}, supported is {ACTIVATION!r}")


def quantization(raw: Fields) -> Quantization | None:
    """How MLX has packed the weights, None where it has not."""
    given = raw.get("quantization")
    if given is None and raw.get("quantization_config") is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"quantization_config is {raw.get('quantization_config')!r}, not MLX's own"
        )
    if given.get("mode", "affine") != "affine":
        raise ValueError(f"quantization.mode is {given['mode']!r}")
    return Quantization(size(given, "group_size"), size(given, "bits"))
