"""The config.json of DFlash's family in the words of z-lab's, and the fields that are known.

What each of them means is on the page of formats (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from dflash_mlx.drafters.formats import SPECULATORS, layers_of_speculators, proposed_tokens
from dflash_mlx.drafters.networks.fields import (
    COPIED,
    NETWORK_REFUSED,
    NOTHING,
    SLIDING,
    SPECULATORS_READ,
    SPECULATORS_SILENT,
    Fields,
    Part,
    Refused,
    Unsupported,
    architecture,
    flag,
    head_dim,
    layer_windows,
    layers_of_states,
    named,
    number,
    part,
    size,
    size_or_none,
    stored_shape,
    whole,
)

VERSION_1, VERSION_2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"
DOMINO = "DominoDraftModel"
OF_SPECULATORS = {"dflash": VERSION_1, "dflash2": VERSION_2, "dspark": DSPARK}
_ALIASES = {  # classes of the same networks
    "Qwen3DFlashDraftModel": VERSION_1,
    "Qwen3DFlash2DraftModel": VERSION_2,
    "Qwen3DSparkModel": DSPARK,
    "Qwen35DSparkModel": DSPARK,  # Qwen3's layers or Qwen3.5's own, see `is_native_35`
    "Lfm2DSparkDraftModel": DSPARK,
    "Qwen3DFlashModel": DSPARK,  # without its heads
}
MUSE, _GEMMA = "MuseGlimmerAssistantModel", "Gemma4DSparkModel"
_MUSE_TARGET = {  # of the one target that it was made for, which its own file leaves out
    "vocab_size": 202_048,
    "output_multiplier": 0.19611613513818404,
    "final_logit_softcapping": 20.0,
}
_GEMMA_ONLY = {  # what its layers do
    "hidden_activation": "gelu_pytorch_tanh",
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
}
_EMBEDDING = "embed_tokens.weight"
_HINT = (
    "; they number hidden states from the output of the embedding, 0, which no drafter reads (if "
    "these number layers, add them as dflash_config.target_layer_ids)"
)

METHOD = "dflash_config"
PROJECTOR_DOMINO = "domino"
_PROJECTORS = (PROJECTOR_DOMINO, "causal_v5")
HEADS: dict[str, dict[str, Callable[[Fields, str], Any]]] = {  # fields that a class has besides
    VERSION_2: {
        "conv_kernel_size": size,
        "conv_group_size": size,
        "selector_rank": size,
        "selector_top_k": size,
        "selector_vocab_size": size_or_none,
    },
    DOMINO: {
        "emb_dim": size,
        "gru_hidden_dim": size,
        "pure_draft_prefix_len": partial(whole, default=0, least=0),
    },
}
ANCHOR = ("sample_from_anchor", "query_zero_predicts_next", "dspark_bonus_anchor")
CAUSAL = ("is_causal", "causal", "dflash_query_causal", "causal_head")
BESIDE = (  # what may be beside `dflash_config`
    "mask_token_id", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "projector_type", "shift_label", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "use_confidence_head", *HEADS[VERSION_2], *HEADS[DOMINO],
    *ANCHOR, *CAUSAL,
)  # fmt: skip
WINDOWS = (  # what vLLM takes beside `transformer_layer_config` too
    "layer_types", "max_window_layers", "sliding_window", "use_sliding_window",
)  # fmt: skip
GATED, OFFSET = "enable_qwen35_gated_q_proj", "offset_norms"
NATIVE = "qwen3_5"  # model_type of drafters with Qwen3.5's own layers, others have its text model's
_PARTIAL = "partial_rotary_factor"
_QUERIES = "layers.0.self_attn.q_proj.weight"

_REFUSED = {
    **NETWORK_REFUSED,
    "fc_layernorm": Refused("but norms of each layer that is read are not supported"),
    "log_snr_conditioning": Refused("but embeddings of the noise are not supported"),
    "xpress_block_size": Refused("XPress's, which is not supported"),
    "jetspec_config": Refused("which is not read; put its fields into dflash_config"),
    "attention_mode": Refused("supported are 'gqa' and 'mha'", (*NOTHING, "gqa", "mha")),
    "use_aux_hidden_state": Refused("supported is true", (None, True)),
}
_TRAINING = frozenset({  # of SpecForge's and of several versions of speculators
    "auf", "ce_loss_alpha", "confidence_head_alpha", "l1_loss_alpha", "lambda_base_decay_ratio",
    "lambda_base_start", "loss_decay_gamma", "max_anchors", "num_anchors", "training_mode",
})  # fmt: skip
_NO_DOMINO = Refused("of Domino's head, but projector_type is not 'domino'", tensor="prefix_gru")
_NOT_ITS = Part(refused=dict.fromkeys(HEADS[DOMINO], _NO_DOMINO), is_open=True)
_IN_METHOD = Part(
    read={
        *BESIDE, "block_size", "draft_vocab_size", "layer_ids", "num_target_layers",
        "own_embedding", "own_head", "sliding_window", "swa_window_size", "target_hidden_size",
        "target_layer_ids", "use_swa",
    },
    noted=(  # other programs' advice
        "block_size_policy", "dflash_initial_block_size", "draft_window_size",
        "prefer_requested_block_size", "runtime_block_size",
    ),
    silent=_TRAINING,
    refused=_REFUSED,
)  # fmt: skip
_AROUND = Part(noted=(*COPIED, _PARTIAL, "confidence_temperatures"), refused=_REFUSED, is_open=True)
_IN_SPECULATORS = Part(
    read={
        *SPECULATORS_READ, *BESIDE, *WINDOWS, METHOD, "aux_hidden_state_layer_ids", "block_size",
        "sliding_window_non_causal",
    },
    silent=SPECULATORS_SILENT | _TRAINING,
    refused=_REFUSED,
)  # fmt: skip


def in_our_words(raw: Fields, names: Collection[str]) -> Fields:
    """A config.json in z-lab's words; raises as `FileFormat.translate`."""
    if SPECULATORS in raw:
        return _from_speculators(raw, names)
    if (name := architecture(raw)) == MUSE:
        return _from_muse(raw)
    if name == _GEMMA:
        return _from_dspark(_from_gemma(raw, names), names)
    kind = _ALIASES.get(name, name)
    if is_domino(raw) and kind in (VERSION_1, DOMINO):
        return _from_domino(raw)
    if kind == DSPARK or (kind == VERSION_1 and _has_markov(raw)):
        return _from_dspark(raw, names)
    return {**raw, "architectures": [kind]}


def _has_markov(raw: Fields) -> bool:
    """Whether a file of the first version's class is DSpark's, by its Markov head.

    Raises Unsupported where it does not say which rows of its block draft: such files do it either
    way, and the wrong one drafts every token a place too early.
    """
    fields = {**raw, **part(raw, METHOD)}
    if not (rank := fields.get("markov_rank")):
        return False
    if not named(fields, ANCHOR) and fields.get("projector_type") != "dspark":
        raise Unsupported(
            f"markov_rank is {rank!r} in a {architecture(raw)}, and nothing says which rows draft",
            "add sample_from_anchor to its dflash_config: true where a block of 7 drafts 7 tokens, "
            "as DSpark's do, false where it drafts 6",
        )
    return True


def _from_domino(raw: Fields) -> Fields:
    """Domino's, which say by `shift_label` which rows draft, and some fields in two places."""
    method = named(raw, BESIDE) | part(raw, METHOD)
    shifted, said = flag(method, "shift_label"), named(method, ANCHOR)
    if said and drafts_from_anchor(method) != shifted:
        raise ValueError(f"shift_label is {shifted}, which {said} contradict")
    method |= {"projector_type": PROJECTOR_DOMINO, "sample_from_anchor": shifted}
    return {**raw, "architectures": [DOMINO], METHOD: method}


def _from_speculators(raw: Fields, names: Collection[str]) -> Fields:
    layers, kind = layers_of_speculators(raw), raw[SPECULATORS]
    method: Fields = named(raw, BESIDE) | part(raw, METHOD)
    if not named(method, ANCHOR):
        # Older files propose as many tokens as their block has rows where each of them drafts
        method["sample_from_anchor"] = proposed_tokens(raw) == raw["block_size"]
    notes = []
    if "target_layer_ids" not in method:
        name = "aux_hidden_state_layer_ids"
        method["target_layer_ids"], note = layers_of_states(raw[name], name, _HINT)
        notes.append(note)
    result = {
        **layers,
        **named(raw, (*WINDOWS, "quantization", "quantization_config", "target_hidden_size")),
        "architectures": [OF_SPECULATORS[kind]],
        "block_size": raw["block_size"],
        "num_target_layers": raw.get("num_target_layers"),
        "notes": notes,
    }
    apart = flag(raw, "sliding_window_non_causal", default=kind == "dflash2")
    if apart and not named(method, CAUSAL):
        result["is_causal"] = False
    rope = layers.get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:
        result["rope_parameters"] = rope["sliding_attention"]  # as the library itself does
    if (drafted := raw.get("draft_vocab_size")) not in (None, layers["vocab_size"]):
        result["draft_vocab_size"] = drafted
    return {**result, METHOD: method | _own_tables(result, names)}


def _from_dspark(raw: Fields, names: Collection[str]) -> Fields:
    """DSpark's fields in z-lab's places; a folder of ours stays as it is."""
    given = part(raw, METHOD)
    if "own_head" in given:
        return {**raw, "architectures": [DSPARK]}
    result = {k: v for k, v in raw.items() if k != "draft_vocab_size" or v != raw.get("vocab_size")}
    method = named(raw, (*BESIDE, "target_layer_ids", "num_target_layers")) | given
    if not named(method, ANCHOR):
        method["sample_from_anchor"] = True
    method.setdefault("markov_rank", raw.get("dspark_markov_rank") or 0)
    layers = method.pop("num_target_layers", None)
    return result | {
        "architectures": [DSPARK],
        "num_target_layers": layers,
        OFFSET: raw.get("model_type") == NATIVE,
        METHOD: method | _own_tables(result, names),
    }


def _from_muse(raw: Fields) -> Fields:
    """The assistant of Muse-Glimmer, a DFlash with its target's numbers left out."""
    inner = named(raw, ("block_size", "mask_token_id", "target_layer_ids"))
    ours = {"architectures": [VERSION_1], "is_causal": False, METHOD: inner}
    return {**_MUSE_TARGET, **raw, **ours}


def _from_gemma(raw: Fields, names: Collection[str]) -> Fields:
    """DSpark of Gemma 4's layers, whose sizes are those of the target's full attention."""
    for name, supported in _GEMMA_ONLY.items():
        if raw.get(name) not in (None, supported):
            raise Unsupported(f"{name} is {raw[name]!r}, supported is {supported!r}")
    if SLIDING in (raw.get("layer_types") or []):
        raise Unsupported(f"layer_types holds {SLIDING!r}, supported are layers of full attention")
    shares, rope = flag(raw, "attention_k_eq_v"), part(raw, "rope_parameters")
    heads = raw.get("num_global_key_value_heads") if shares else None
    scale = size(raw, "hidden_size") ** 0.5
    return {
        **raw,
        **({"input_embedding_scale": scale} if _EMBEDDING in names else {}),  # else the target's
        "gemma_layers": True,
        "head_dim": raw["global_head_dim"],
        "num_key_value_heads": heads or raw["num_key_value_heads"],
        "rope_parameters": rope.get("full_attention", rope),
    }


def _own_tables(told: Fields, names: Collection[str]) -> dict[str, bool]:
    """Whether a drafter with tensors of these names has an embedding and a head."""
    has_head = told.get("draft_vocab_size") is not None or "lm_head.weight" in names
    return {"own_embedding": _EMBEDDING in names, "own_head": has_head}


def review(raw: Fields, names: Collection[str]) -> Iterator[str]:
    """The fields that change nothing; Unsupported for one that is not known."""
    around, method = layers_of_speculators(raw) if SPECULATORS in raw else raw, part(raw, METHOD)
    if not is_domino(raw):
        yield from _NOT_ITS.review({**raw, **method}, names=names)
    yield from _IN_METHOD.review(method, METHOD, names)
    if SPECULATORS in raw:
        yield from _IN_SPECULATORS.review(raw, names=names)
    is_read = is_native_35(around, names) or raw.get("model_type") == NATIVE
    found = _AROUND.review(around, names=names)
    yield from (place for place in found if not (is_read and place == _PARTIAL))


def is_domino(raw: Fields) -> bool:
    """Whether a file is of a drafter with Domino's head, by its class or its projector."""
    kind = {**raw, **part(raw, METHOD)}.get("projector_type")
    return kind in _PROJECTORS or (kind is None and architecture(raw).startswith("Domino"))


def drafts_from_anchor(fields: Fields) -> bool:
    """Whether each row drafts the token behind it; ValueError where two fields contradict."""
    says = {name: flag(fields, name) for name in named(fields, ANCHOR)}
    if "dspark_bonus_anchor" in says:
        says["dspark_bonus_anchor"] ^= True
    if len(set(says.values())) > 1:
        raise ValueError(f"{' and '.join(says)} contradict each other: {named(fields, ANCHOR)}")
    return any(says.values())


def block_attention(fields: Fields) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Per layer its window, None for full attention, and whether it is causal in the block."""
    if fields.get("swa_window_size"):
        fields = {**fields, "sliding_window": size(fields, "swa_window_size")}
    windows = layer_windows(fields)
    causal: bool | None = None
    if flag(fields, "use_swa") and not any(windows):
        if fields.get("sliding_window") is None:
            raise ValueError(
                "use_swa is true, but neither swa_window_size nor sliding_window is given"
            )
        windows, causal = (size(fields, "sliding_window"),) * len(windows), False
    if said := [*named(fields, CAUSAL)]:
        causal = flag(fields, said[0])
    return windows, tuple(window is not None if causal is None else causal for window in windows)


def is_native_35(fields: Fields, names: Collection[str]) -> bool:
    """Whether layers are Qwen3.5's own, with gated queries or norms of 1 + w.

    Trainers copy the target's fields, so of most drafters for Qwen3.5 these describe the target.
    """
    return is_gated(fields, names) or flag(fields, OFFSET)


def is_gated(fields: Fields, names: Collection[str]) -> bool:
    """Whether queries come with gates: by the field, or by the width of q_proj."""
    stored = stored_shape(names, _QUERIES)
    by_width = stored and stored[0] == 2 * size(fields, "num_attention_heads") * head_dim(fields)
    return flag(fields, GATED) or bool(by_width)


def rotary_dims(fields: Fields) -> int | None:
    """How many numbers of a head turn in layers of Qwen3.5's own, None for all."""
    dim, turned = head_dim(fields), {**fields, **part(fields, "rope_parameters")}
    share = number(turned, _PARTIAL, 1.0, above=0)
    if not 2 <= (count := int(dim * share)) <= dim or count % 2:
        raise ValueError(f"{_PARTIAL} is {share}, so {count} of a head's {dim} numbers turn")
    return count
