"""The files of EAGLE-3: the authors' own, vLLM's speculators, and ours.

*Raw* files (SafeAILab, SGLang, SpecForge, NVIDIA) are a Llama's with `draft_vocab_size`; ours are
raw files with `block_size`, `num_target_layers` and what else the others have no word for, without
embedding and head where these are the target's, with weights that MLX may have packed. In vLLM's
speculators the layer lies under `transformer_layer_config`; such a file is told in raw words first.

`eagle_config.eagle_aux_hidden_state_layer_ids`, of raw files, are layers whose output is read, as
SGLang takes them; so are DeepSpec's `target_layer_ids`. The first of these names outside of
`eagle_config`, speculators' and vLLM's, numbers hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from dflash_mlx.drafters.eagle3.model import USUAL_TAPS, EagleConfig, EagleModel, Network
from dflash_mlx.drafters.formats import (
    SPECULATORS,
    FileFormat,
    layers_of_speculators,
    left_by_training,
    proposed_tokens,
)
from dflash_mlx.drafters.networks.fields import (
    COPIED,
    NETWORK_REFUSED,
    SPECULATORS_READ,
    SPECULATORS_SILENT,
    Fields,
    Part,
    Refused,
    Unsupported,
    architecture,
    flag,
    layer_windows,
    layers_of_states,
    listed,
    named,
    part,
    size,
    size_or_none,
    stored_shape,
    whole,
)
from dflash_mlx.drafters.networks.files import FLAGS, WHOLE, in_words

RAW, _P_EAGLE = "LlamaForCausalLMEagle3", "PEagleDraftModel"
DEFAULT_BLOCK = 8  # published files do not say how long their drafts may be
_FIRST = "LlamaForCausalLM"  # in the first uploads, which only draft_vocab_size tells apart
_ALIASES = {  # classes of the same network, and whether theirs norm queries and keys of every head
    "Qwen3Eagle3Model": True,
    "Eagle3Qwen3ForCausalLM": True,
    "Eagle3DraftModel": False,
    "Eagle3MiniMaxM2ForCausalLM": False,
    "Eagle3Qwen2_5vlForCausalLM": False,
    "Eagle3Qwen3vlForCausalLM": False,
    "LlamaEagle3DraftModel": False,
    _P_EAGLE: False,
}
_METHOD = "eagle_config"
LAYERS_READ = "eagle_aux_hidden_state_layer_ids"
_DEEPSPEC = "target_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_COUNTS = ("num_aux_hidden_states", "num_aux_layers")  # of layers that are read
_POST_NORM = "return_hidden_post_norm"  # TensorRT-LLM's name of `norm_output`
_SWITCHES = {  # of eagle_config: what only this network does
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
_PARALLEL, _DEPTHS = "parallel_drafting", "num_depths"  # of P-EAGLE
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_OF_PARALLEL = {_PARALLEL, _DEPTHS, *_MASKS}

_REFUSED = {
    **NETWORK_REFUSED,
    "eh_proj_before_attn": Refused("but a projection before attention is not supported"),
}
_IN_METHOD = Part(
    read={LAYERS_READ, *_NORMS, _POST_NORM, *_SWITCHES, *_COUNTS, *_OF_PARALLEL},
    silent=("next_layer_regular", "parallel_draft_heads_num_layers"),  # of more steps and layers
    refused=_REFUSED,
)
_AROUND = Part(noted=(*COPIED, "partial_rotary_factor"), refused=_REFUSED, is_open=True)
_BESIDE = SPECULATORS_READ | {_METHOD, LAYERS_READ, *_NORMS, *_OF_PARALLEL}  # the layer
_IN_SPECULATORS = Part(read=_BESIDE, silent=SPECULATORS_SILENT, refused=_REFUSED)
_TOLD = _BESIDE - {SPECULATORS, "transformer_layer_config", "notes"}  # by the same names in ours


class EagleFiles(FileFormat):
    """EAGLE-3, EAGLE-3.1 and P-EAGLE."""

    config, network, model = EagleConfig, Network, EagleModel
    known = (RAW, "Eagle3LlamaForCausalLM", _FIRST)
    speculators = ("eagle3", "peagle")
    classes = ((".*Eagle3.*|P[Ee]agle.*", ""), (_FIRST, "draft_vocab_size"))

    def review(self, raw: Fields, names: Collection[str]) -> Iterator[str]:
        yield from _IN_METHOD.review(part(raw, _METHOD), _METHOD, names)
        if SPECULATORS in raw:
            yield from _IN_SPECULATORS.review(raw, names=names)
            layers = raw.get("transformer_layer_config")
            raw = layers if isinstance(layers, dict) else {}
        yield from _AROUND.review(raw, names=names)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        if SPECULATORS not in raw:
            return _named(raw, names)
        layer = layers_of_speculators(raw)
        told = {name: v for name, v in raw.items() if name in _TOLD and v is not None}
        kind = layer.get("model_type", "qwen3")  # as the library has it
        if raw[SPECULATORS] == "peagle":
            told[_PARALLEL], tokens = True, proposed_tokens(raw)
            told |= {"block_size": tokens + 1} if tokens else {}
        return {**layer, **told, "architectures": [RAW], "qk_norm": kind == "qwen3"}

    def read_fields(self, told: Fields, names: Collection[str]) -> EagleConfig:
        method = part(told, _METHOD)
        both = {**method, **told}
        parallel = _is_parallel(both, names)
        _check_kind(told, method, names, parallel)
        aux_layers, notes = _aux_layers(told, method)
        vocabulary, width = size(told, "vocab_size"), size(told, "hidden_size")
        drafted = size(told, "draft_vocab_size", vocabulary)
        target_width = size(told, "target_hidden_size", width)
        narrower, unknown, ours = target_width != width, not names, {*map(_renamed, names)}
        drafts = whole(both, _DEPTHS, default=0) or DEFAULT_BLOCK - 1  # as deep as was trained
        layers = size(told, "num_hidden_layers")
        kinds = (told.get("layer_types") or [])[:layers]  # some have those of a target
        return EagleConfig.read(
            both,
            block_size=size(told, "block_size", drafts + 1),
            target_hidden_size=target_width,
            aux_layers=aux_layers,
            num_target_layers=size_or_none(told, "num_target_layers"),
            layer_windows=layer_windows({**told, "layer_types": kinds}),
            head_norms=flag(told, "qk_norm"),
            norm_output=flag(both, "norm_output", flag(method, _POST_NORM)),
            draft_vocab_size=None if drafted == vocabulary else drafted,
            own_embedding="embed_tokens.weight" in ours or (unknown and narrower),
            own_head="lm_head.weight" in ours or (unknown and (narrower or drafted != vocabulary)),
            **(_masks(both, names, target_width, aux_layers) if parallel else {}),
            notes=(*listed(told.get("notes") or [], "notes", str), *notes),
        )

    def our_names(self, names: Collection[str]) -> dict[str, str]:
        return {n: _renamed(n) for n in names}

    def optional(self, config: EagleConfig) -> dict[str, str]:
        found = left_by_training(config.target_hidden_size, config.drafted)
        if config.draft_vocab_size is None:  # maps of a draft vocabulary that is the whole one
            found["d2t"] = in_words(WHOLE, (config.vocab_size,))
            found["t2d"] = in_words(FLAGS, (config.vocab_size,))
        return found


FILES = EagleFiles()


def _named(raw: Fields, names: Collection[str]) -> Fields:
    """A raw file under the name that we have for its class.

    Whether heads are normed its tensors show; where these are not known, the class.
    """
    if (kind := architecture(raw)) not in _ALIASES:
        return raw
    normed = any(name.endswith(".q_norm.weight") for name in names) if names else _ALIASES[kind]
    told = {"architectures": [RAW], "qk_norm": flag(raw, "qk_norm", normed)}
    return {**raw, **told, **({_PARALLEL: True} if kind == _P_EAGLE else {})}


def _renamed(name: str) -> str:
    """Our name of a tensor. NVIDIA's are below `model.`; some count the first layer."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _masks(
    fields: Fields, names: Collection[str], width: int, aux_layers: tuple[int, ...] | None
) -> dict[str, Any]:
    """What P-EAGLE's rows behind the anchor have; their vector is [1, m*D] or [1, 1, m*D]."""
    features = width * (USUAL_TAPS if aux_layers is None else len(aux_layers))
    shape = stored_shape(names, "mask_hidden")
    known = shape if shape == (1, features) else (1, 1, features)
    return {"mask_token_id": _mask_token(fields), "mask_hidden": known}


def _check_kind(raw: Fields, method: Fields, names: Collection[str], parallel: bool) -> None:
    """Raise ValueError for drafters that only look like this one."""
    if (layers := size(raw, "num_hidden_layers")) != 1 and not parallel:
        raise ValueError(f"num_hidden_layers is {layers}, supported is 1")
    for name, value in _SWITCHES.items():
        if method.get(name) not in (None, value):
            raise ValueError(f"eagle_config.{name} is {method[name]!r}, supported is {value}")
    if flag(raw, "tie_word_embeddings") and names and "lm_head.weight" not in names:
        raise ValueError("tie_word_embeddings is true, supported is false")


def _aux_layers(raw: Fields, method: Fields) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Layers whose outputs are read, None where no field says so; and what had to be assumed.

    Raises ValueError for fields that name different layers, or another number of them.
    """
    found: dict[str, tuple[int, ...]] = {}
    notes: tuple[str, ...] = ()
    if (ids := method.get(LAYERS_READ)) is not None:
        found[f"{_METHOD}.{LAYERS_READ}"] = _layers(ids, LAYERS_READ)
    if (ids := raw.get(_DEEPSPEC)) is not None:
        found[_DEEPSPEC] = _layers(ids, _DEEPSPEC)
    if not found and (ids := raw.get(LAYERS_READ)) is not None:
        layers, note = layers_of_states(ids, LAYERS_READ)
        found[LAYERS_READ], notes = tuple(layers), (note,)
    if len(set(found.values())) > 1:
        raise ValueError(" and ".join(f"{name} are {[*ids]}" for name, ids in found.items()))
    layers_read = next(iter(found.values()), None)
    count = USUAL_TAPS if layers_read is None else len(layers_read)
    for name, given in named({**method, **raw}, _COUNTS).items():
        if given != count:
            raise ValueError(f"{name} is {given!r}, but {count} layers are read")
    return layers_read, notes


def _is_parallel(fields: Fields, names: Collection[str]) -> bool:
    """Whether all rows of a draft go through in one pass, P-EAGLE's; ValueError for yes and no."""
    signs = named(fields, _MASKS)
    if whole(fields, _DEPTHS, default=0) > 1:
        signs[_DEPTHS] = fields[_DEPTHS]
    if fields.get(_PARALLEL) is None:
        return bool(signs) or any(name.endswith("mask_hidden") for name in names)
    if signs and not flag(fields, _PARALLEL):
        raise ValueError(f"{_PARALLEL} is false, but {signs} are P-EAGLE's")
    return flag(fields, _PARALLEL)


def _mask_token(fields: Fields) -> int:
    """The token of rows that have none; Unsupported where a file does not say it."""
    given = {name: whole(fields, name) for name in named(fields, _MASKS)}
    if not given:
        raise Unsupported(
            "a drafter of P-EAGLE does not say which token its masks are",
            "add mask_token_id to it, the token that it was trained with",
        )
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: {given}")
    return next(iter(given.values()))


def _layers(ids: object, name: str) -> tuple[int, ...]:
    if not (numbers := listed(ids, name, int)) or min(numbers) < 0:
        raise ValueError(f"{name} are {ids!r}, not numbers from 0 up")
    return tuple(whole({name: number}, name) for number in numbers)
