"""The fields of DFlash's family: which are known, and those that several names say.

*Who drafts.* `sample_from_anchor`, or `query_zero_predicts_next` as PixelML has it: each row of the
block drafts the token behind it, the anchor's too. NVIDIA's `dspark_bonus_anchor` says the reverse.

*What a row sees of its block.* `is_causal` of z-lab's, `causal` of vLLM's, `dflash_query_causal` of
NVIDIA's and `causal_head` of JetSpec's files hold for all layers, the first of
them that a file has. Without any, layers with a window of their own are causal, and others are not.

*Windows.* vLLM's `use_swa` gives every layer one, of `swa_window_size`, unless `layer_types` has
windows already; such layers are not causal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dflash_mlx.drafters.networks.fields import (
    Fields,
    architecture,
    flag,
    layer_windows,
    named,
    number,
    part,
    size,
    stored_shape,
)
from dflash_mlx.drafters.networks.known_fields import (
    COPIED,
    NETWORK_REFUSED,
    NOTHING,
    SPECULATORS_READ,
    SPECULATORS_SILENT,
    Part,
    Refused,
)

METHOD = "dflash_config"
DOMINO = "domino"
_PROJECTORS = (DOMINO, "causal_v5")
_OF_DOMINO = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
ANCHOR = ("sample_from_anchor", "query_zero_predicts_next", "dspark_bonus_anchor")
CAUSAL = ("is_causal", "causal", "dflash_query_causal", "causal_head")
BESIDE = (  # what may be beside `dflash_config`
    "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "selector_vocab_size", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "projector_type", "shift_label", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "use_confidence_head", *_OF_DOMINO, *ANCHOR, *CAUSAL,
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
_NOT_ITS = Part(refused=dict.fromkeys(_OF_DOMINO, _NO_DOMINO), is_open=True)
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


def review(raw: Fields, names: Collection[str], is_speculators: bool) -> Iterator[str]:
    """The fields that change nothing; Unsupported for one that is not known."""
    method = part(raw, METHOD)
    if not is_domino(raw):
        yield from _NOT_ITS.review({**raw, **method}, names=names)
    yield from _IN_METHOD.review(method, METHOD, names)
    if is_speculators:
        yield from _IN_SPECULATORS.review(raw, names=names)
        layers = raw.get("transformer_layer_config")
        raw = layers if isinstance(layers, dict) else {}
    is_read = is_native_35(raw, names) or (raw.get("model_type") == NATIVE and not is_speculators)
    found = _AROUND.review(raw, names=names)
    yield from (place for place in found if not (is_read and place == _PARTIAL))


def is_domino(raw: Fields) -> bool:
    """Whether a file is of a drafter with Domino's head, by its class or its projector."""
    kind = {**raw, **part(raw, METHOD)}.get("projector_type")
    return kind in _PROJECTORS or (kind is None and architecture(raw).startswith("Domino"))


def has_anchor(fields: Fields) -> bool:
    """Whether a file says which rows draft."""
    return bool(named(fields, ANCHOR))


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
    if flag(fields, GATED):
        return True
    if (stored := stored_shape(names, _QUERIES)) is None:
        return False
    heads = size(fields, "num_attention_heads")
    return stored[0] == 2 * heads * size(fields, "head_dim", size(fields, "hidden_size") // heads)


def rotary_dims(fields: Fields) -> int | None:
    """How many numbers of a head turn in layers of Qwen3.5's own, None for all."""
    turned = {**fields, **part(fields, "rope_parameters")}
    heads = size(fields, "num_attention_heads")
    dim = size(fields, "head_dim", size(fields, "hidden_size") // heads)
    share = number(turned, _PARTIAL, 1.0, above=0)
    if not 2 <= (count := int(dim * share)) <= dim or count % 2:
        raise ValueError(f"{_PARTIAL} is {share}, so {count} of a head's {dim} numbers turn")
    return count
