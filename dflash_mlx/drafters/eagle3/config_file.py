"""The config.json of EAGLE-3 folders: the authors' own, speculators', and ours, field by field.

*Raw* files (SafeAILab, SGLang, SpecForge, NVIDIA) are a Llama's with `draft_vocab_size`; ours are
raw files with `block_size`, `num_target_layers` and what else the others have no word for. In
vLLM's speculators the layer lies under `transformer_layer_config`; such a file is told in raw words
first.

Which layers are read has two numberings. `eagle_config.eagle_aux_hidden_state_layer_ids`, of raw
files, are layers whose output is read, as SGLang takes them. The same field outside of
`eagle_config`, speculators' and vLLM's, numbers hidden states, the embedding's output as 0: id k is
the output of layer k - 1 (0-based). A file alone cannot prove it, so that leaves a note.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflash_mlx.core.config import MOST_ROWS
from dflash_mlx.drafters.eagle3.network import EagleConfig
from dflash_mlx.drafters.networks.fields import (
    Fields,
    architecture,
    check_activation,
    flag,
    layer_count,
    listed,
    quantization,
    shape,
    shape_problems,
    size,
    too_large,
    whole,
)

KIND = "eagle3"  # in speculators
RAW = "LlamaForCausalLMEagle3"
DEFAULT_BLOCK = 8  # published files do not say how long their drafts may be
_FIRST = "LlamaForCausalLM"  # in the first uploads, which only draft_vocab_size tells apart
_KNOWN = (RAW, "Eagle3LlamaForCausalLM", _FIRST)
LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
_TOLD = (  # what speculators has beside the layer, by the same names
    "draft_vocab_size", "target_hidden_size", "num_target_layers", "tie_word_embeddings",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", LAYERS_READ,
)  # fmt: skip
_SWITCHES = {  # of eagle_config: what only this network does
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


def recognises(raw: Any) -> bool:
    """Whether a config.json is of an EAGLE-3 drafter, readable or not."""
    first = architecture(raw) == _FIRST and "draft_vocab_size" in raw
    return first or "Eagle3" in architecture(raw) or raw.get("speculators_model_type") == KIND


def translate(raw: Any) -> Fields:
    """A config.json in raw words; one that is in them already stays as it is.

    Raises KeyError for a missing field, ValueError for one of the wrong kind.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"the contents are {raw!r}")
    if raw.get("speculators_model_type") != KIND:
        return raw
    layer = raw["transformer_layer_config"]
    if not isinstance(layer, dict):
        raise ValueError(f"transformer_layer_config is {layer!r}")
    told = {name: raw[name] for name in _TOLD if raw.get(name) is not None}
    kind = layer.get("model_type", "qwen3")  # as the library has it
    return {**layer, **told, "architectures": [RAW], "qk_norm": kind == "qwen3"}


def parse_fields(raw: Fields, names: Collection[str]) -> EagleConfig:
    """The configuration in a config.json in raw words.

    names: of the tensors beside it, () where these are not known. Raises KeyError for a missing
    field, ValueError or TypeError for one of the wrong kind or size.
    """
    method = raw.get("eagle_config") or {}
    if not isinstance(method, dict):
        raise ValueError(f"eagle_config is {method!r}")
    _check_kind(raw, method, names)
    either, vocabulary = {**method, **raw}, size(raw, "vocab_size")
    aux_layers, notes = _aux_layers(raw, method)
    slides = (raw.get("layer_types") or [])[:1] == ["sliding_attention"]
    own = size(raw, "draft_vocab_size", vocabulary)
    width = size(raw, "hidden_size")
    target_width = size(raw, "target_hidden_size", width)
    narrower, unknown = target_width != width, not names
    return EagleConfig(
        **shape(raw),
        block_size=size(raw, "block_size", DEFAULT_BLOCK),
        target_hidden_size=target_width,
        target_layer_ids=aux_layers,
        num_target_layers=size(raw, "num_target_layers", 0) or None,
        vocab_size=vocabulary,
        window=size(raw, "sliding_window") if slides else None,
        head_norms=flag(raw, "qk_norm"),
        norm_before_residual=flag(either, "norm_before_residual"),
        norm_before_fc=flag(either, "norm_before_fc"),
        fc_norm=flag(either, "fc_norm"),
        norm_output=flag(either, "norm_output"),
        draft_vocab_size=None if own == vocabulary else own,
        own_embedding="embed_tokens.weight" in names or (unknown and narrower),
        own_head="lm_head.weight" in names or (unknown and (narrower or own != vocabulary)),
        quantization=quantization(raw),
        notes=(*listed(raw.get("notes") or [], "notes", str), *notes),
    )


def problems(config: EagleConfig) -> dict[str, Any]:
    """How fields may contradict each other, each with whether they do."""
    width, features, block = config.hidden_size, config.target_hidden_size, config.block_size
    vocabulary, own = config.vocab_size, config.draft_vocab_size
    borrows = not (config.own_embedding and config.own_head)
    products = {
        f"{config.features} layers of target_hidden_size {features}": config.features * features,
        f"two inputs of hidden_size {width}": 2 * width,
    }
    return {
        **shape_problems(config),
        f"block_size is {block}, not from 2 to {MOST_ROWS}": not 2 <= block <= MOST_ROWS,
        f"draft_vocab_size is {own}, more than the vocabulary of {vocabulary}":
            own is not None and own > vocabulary,
        f"draft_vocab_size is {own} of {vocabulary} tokens, but there is no lm_head for them":
            own is not None and not config.own_head,
        f"target_hidden_size is {features} and hidden_size {width}, but the drafter does not bring "
        "an embedding and a head of its own": borrows and features != width,
        "norm_before_fc and fc_norm are both true": config.norm_before_fc and config.fc_norm,
        **too_large(products),
    }  # fmt: skip


def _check_kind(raw: Fields, method: Fields, names: Collection[str]) -> None:
    """Raise ValueError for drafters that only look like this one."""
    if (kind := architecture(raw)) not in _KNOWN:
        raise ValueError(f"architectures is {kind!r}, supported are {', '.join(_KNOWN)}")
    check_activation(raw)
    if (layers := layer_count(raw)) != 1:
        raise ValueError(f"num_hidden_layers is {layers}, supported is 1")
    for name, value in _SWITCHES.items():
        if method.get(name) not in (None, value):
            raise ValueError(f"eagle_config.{name} is {method[name]!r}, supported is {value}")
    if flag(raw, "tie_word_embeddings") and names and "lm_head.weight" not in names:
        raise ValueError("tie_word_embeddings is true, supported is false")


def _aux_layers(raw: Fields, method: Fields) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Layers whose outputs are read, None where no field says so; and what had to be assumed."""
    if (ids := method.get(LAYERS_READ)) is not None:
        return _numbers(ids, least=0), ()
    if (ids := raw.get(LAYERS_READ)) is None:
        return None, ()
    aux_layers = tuple(i - 1 for i in _numbers(ids, least=1))
    note = f"{LAYERS_READ} {ids} are taken to number hidden states, so the drafter reads the "
    return aux_layers, (f"{note}outputs of layers {list(aux_layers)}, counted from 0",)


def _numbers(ids: Any, least: int) -> tuple[int, ...]:
    found = listed(ids, LAYERS_READ, int)
    if not found or min(found) < least:
        raise ValueError(f"{LAYERS_READ} are {ids!r}, not numbers from {least} up")
    return tuple(whole({LAYERS_READ: i}, LAYERS_READ) for i in found)
