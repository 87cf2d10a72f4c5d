"""What becomes of a field of a draft model's config.json: it is read, refused, or says nothing.

Readers raise KeyError for a missing field, ValueError or TypeError for one of the wrong kind or
size.

A drafter that is read wrongly still answers right, only never faster, and nothing tells its user
why. So no field that may matter is passed over. In a part that describes the method, every field is
known or refused by its name. Beside the network's own sizes stand fields of its target, of training
and of libraries, more than anybody can list; there those known to matter are refused or noted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dflash_mlx.system.safetensors_header import MAX_DIMENSION

MAX_LAYERS = 1024  # published drafters have 1 to 8
FULL, SLIDING = "full_attention", "sliding_attention"
_BY_LAYER = ("layer_sliding_windows", "sliding_windows")
_FIRST_SLIDING = 28  # `max_window_layers` of transformers where a file does not say

Fields = dict[str, Any]


def architecture(raw: Any) -> str:
    """What the config.json says that it describes."""
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return str(names[0])[:80] if isinstance(names, list) and names else "unknown"


def flag(raw: Fields, name: str, default: bool = False) -> bool:
    """A field that is true, false or absent."""
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


size = partial(whole, least=1)


def size_or_none(raw: Fields, name: str) -> int | None:
    """A size, None where the field is absent."""
    return None if raw.get(name) is None else size(raw, name)


def head_dim(raw: Fields, name: str = "head_dim") -> int:
    """Numbers of a head; where a file does not say, what the width has for each."""
    return size(raw, name, size(raw, "hidden_size") // size(raw, "num_attention_heads"))


def factor(raw: Fields, name: str) -> float:
    """A number above 0, 1 where the field is absent."""
    return number(raw, name, 1.0, above=0)


def cap(raw: Fields, name: str) -> float | None:
    """A soft cap, None where the field is absent or 0."""
    return number(raw, name, 0.0) or None


def part(raw: Fields, name: str) -> Fields:
    """A field that holds fields, {} where it is absent."""
    given = raw.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {given!r}")
    return given


def listed(given: Any, name: str, kind: type) -> tuple[Any, ...]:
    """A list of values of one kind."""
    if not isinstance(given, list) or not all(type(each) is kind for each in given):
        raise ValueError(f"{name} are {given!r}")
    return tuple(given)


def layers_of_states(ids: Any, name: str, hint: str = "") -> tuple[list[int], str]:
    """The target layers (0-based) whose outputs have these numbers among hidden states.

    Number 0 is the embedding's output, so k is the output of layer k - 1. A file alone cannot prove
    that it counts so: beside the layers comes a note of what was assumed.
    """
    if not listed(ids, name, int) or min(ids) < 1:
        raise ValueError(f"{name} are {ids!r}, not numbers from 1 up{hint}")
    layers = [number - 1 for number in ids]
    note = f"{name} {ids} are taken to number hidden states, so the drafter reads the outputs of "
    return layers, f"{note}layers {layers}, counted from 0"


def named(raw: Fields, names: Collection[str]) -> Fields:
    """Those of these fields that a file has, None as little as none."""
    return {name: raw[name] for name in names if raw.get(name) is not None}


def stored_shape(tensors: Collection[str], name: str) -> tuple[int, ...] | None:
    """The shape of a tensor of a folder, None where it is missing or only names are known."""
    found = tensors.get(name) if isinstance(tensors, Mapping) else None
    return None if found is None else tuple(found.shape)


def rope(raw: Fields, name: str = "") -> dict[str, Any]:
    """`rope_parameters` (newer files), or rope_theta beside an optional `rope_scaling`."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"rope_parameters are {given!r}")
    for own, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{own} of the rope is {value!r}, not a finite number")
    result = dict(given)
    result.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    number(result, "rope_theta", above=0)
    number(result, "partial_rotary_factor", 1.0, above=0)
    result.setdefault("rope_type", result.get("type", "default"))
    if not flag(raw, "rope_is_neox_style", default=True):
        result["interleaved"] = True  # neighbouring numbers turn together
    return result


def layer_windows(raw: Fields, name: str = "") -> tuple[int | None, ...]:
    """The sliding window of every layer, None for full attention.

    Files say it by `layer_types`, else by `use_sliding_window` for the layers from
    `max_window_layers` on, as transformers reads Qwen's; or by a list of windows, null for none.
    """
    if (layers := size(raw, "num_hidden_layers")) > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}, more than {MAX_LAYERS}")
    types = _layer_types(raw, layers)
    if unknown := set(types) - {FULL, SLIDING}:
        raise ValueError(f"layer_types holds {unknown.pop()!r}")
    by_layer = named(raw, _BY_LAYER)
    if not by_layer:
        return tuple(size(raw, "sliding_window") if kind == SLIDING else None for kind in types)
    field, entries = next(iter(by_layer.items()))
    if not isinstance(entries, list) or len(entries) != layers:
        raise ValueError(f"{field} is {entries!r}, not a list for {layers} layers")
    windows = tuple(None if each is None else size({field: each}, field) for each in entries)
    has_window = [FULL if window is None else SLIDING for window in windows]
    if raw.get("layer_types") and types != has_window:
        raise ValueError(f"{field} is {entries}, but layer_types is {types}")
    return windows


def _layer_types(raw: Fields, layers: int) -> list[str]:
    if types := raw.get("layer_types"):
        if len(types) != layers:
            raise ValueError(f"layer_types: {len(types)} entries for {layers} layers")
        return list(types)
    is_null = raw.get("sliding_window", 0) is None  # which transformers reads as no window
    if not flag(raw, "use_sliding_window") or is_null:
        return [FULL] * layers
    first = whole(raw, "max_window_layers", _FIRST_SLIDING, least=0)
    return [SLIDING if layer >= first else FULL for layer in range(layers)]


OTHER_DRAFTER = "choose another drafter with --drafter, or --method none"
_UNKNOWN = (
    "remove the field if it only describes training or another program's settings, else "
    + OTHER_DRAFTER
)
_LONGEST = 80  # characters of a value in a message
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})  # values that ask for nothing


class Unsupported(ValueError):
    """A draft model says something that its network here does not do."""

    def __init__(self, what: str, next_step: str = OTHER_DRAFTER) -> None:
        super().__init__(what)
        self.next_step = next_step


@dataclass(frozen=True)
class Refused:
    """A field that asks for something that is not supported, in most of its values."""

    why: str  # behind the field and its value
    harmless: tuple[Any, ...] = NOTHING
    # What a name of its tensors holds then; in a file without, the field is a target's or idle
    tensor: str = ""

    def contradicted(self, names: Collection[str]) -> bool:
        """Whether the tensors beside a file show that it does not describe its drafter."""
        return bool(self.tensor and names) and not any(self.tensor in name for name in names)


@dataclass(frozen=True)
class Part:
    """The fields that a part of a config.json may have."""

    read: Collection[str] = ()
    noted: Collection[str] = ()  # which change nothing, though they look as if they could
    silent: Collection[str] = ()  # which change nothing, and nobody would think that they do
    refused: Mapping[str, Refused] = field(default_factory=dict)
    is_open: bool = False  # to others beside them, which nobody can list

    def review(self, given: Fields, name: str = "", names: Collection[str] = ()) -> Iterator[str]:
        """The fields that are left out and noted; Unsupported for one that cannot be.

        name: of the part in the file, "" for the file itself. names: of the tensors beside it, ()
        where these are not known.
        """
        for own, value in given.items():
            place = f"{name}.{own}" if name else own
            refused = self.refused.get(own)
            if own in self.noted or (refused and refused.contradicted(names)):
                if value not in NOTHING:
                    yield place
            elif refused:
                _check(place, value, refused)
            elif not self.is_open and own not in self.read and own not in self.silent:
                _check(place, value, Refused("a field that this program does not know"), _UNKNOWN)
                yield place


def note_of(places: Iterable[str]) -> tuple[str, ...]:
    """What a drafter says of the fields that were left out."""
    listed = ", ".join(dict.fromkeys(places))
    return (f"not read, since nothing here depends on it: {listed}",) if listed else ()


def _check(place: str, value: Any, refused: Refused, next_step: str = OTHER_DRAFTER) -> None:
    if value not in refused.harmless:
        text = repr(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        raise Unsupported(f"{place} is {text}, {refused.why}", next_step)


# Fields of transformers' configurations that a network's layers do not depend on
LIBRARY = frozenset({
    "_attn_implementation", "_name_or_path", "add_cross_attention", "architectures",
    "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "dtype", "eos_token_id",
    "finetuning_task", "has_no_defaults_at_init", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "model_type", "name_or_path", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
# Of vLLM's library beside the network, whatever the drafter
SPECULATORS_READ = frozenset({
    "speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size",
    "num_target_layers", "tie_word_embeddings", "quantization", "quantization_config", "notes",
})  # fmt: skip
SPECULATORS_SILENT = LIBRARY | {"speculators_config", "speculators_version", "embed_requires_grad"}
_SINKS = Refused("but attention sinks are not supported", tensor="sink")
_LATENT = Refused(
    "but attention over latent keys and values (MLA) is not supported", tensor="kv_a_proj"
)
# Fields beside the network's own that change what it does, whatever the drafter
NETWORK_REFUSED: Mapping[str, Refused] = {
    "attention_sink_bias": _SINKS,
    "add_swa_attention_sink_bias": _SINKS,
    "swa_attention_sink_enabled": _SINKS,
    "kv_lora_rank": _LATENT,
    "q_lora_rank": _LATENT,
    "logit_scale": Refused("but scaled logits are not supported", (*NOTHING, 1)),
    "mlp_bias": Refused("but biases of the MLP are not supported", tensor="down_proj.bias"),
}
# Of a target, which trainers copy into its drafter's file, and which the tensors contradict
COPIED = (
    "attn_output_gate", "output_gate_type", "mrope_section", "mrope_interleaved",
)  # fmt: skip
