"""The config.json of z-lab's DFlash and DFlash 2 folders, and of ours, field by field.

Fields of the method are in `dflash_config`; older and newer files have some of them beside it.

Folders of vLLM's speculators library are told in these words. There the network lies under
`transformer_layer_config`, what makes it a drafter beside that. Tensors have z-lab's names;
embedding and head may be among them, and a reduced draft vocabulary with `d2t`.

So are DSpark's, in which DeepSeek keeps the fields of the method beside those of the network, and
others keep them as z-lab does. Their `block_size` counts the rows of the network's block. Each row
drafts the token behind it, the anchor's too (`sample_from_anchor`), so a block of 7 drafts 7 tokens
and is one of 8 here. Speculators files that do not have that field are from before there was one.

`aux_hidden_state_layer_ids` number hidden states, the embedding's output as 0: id k is the output
of layer k - 1 (0-based), z-lab's `target_layer_ids` are one less. The library's own converter and
vLLM agree on that; a file alone cannot prove it, so reading one leaves a note of it. A file that
counts otherwise can say so: `dflash_config.target_layer_ids` in it is taken as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflash_mlx.drafters.dflash.convolution import ConvolutionConfig
from dflash_mlx.drafters.dflash.markov import MarkovConfig
from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.drafters.networks.fields import (
    Fields,
    architecture,
    check_activation,
    flag,
    layer_windows,
    listed,
    number,
    quantization,
    shape,
    shape_problems,
    size,
    too_large,
    whole,
)

VERSION_1, VERSION_2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"
MAX_BLOCK = 1024  # positions; published drafters have 4 to 16
PROJECTOR = "dflash"
MARKOV = "vanilla"
_SPECULATORS = {"dflash": VERSION_1, "dflash2": VERSION_2, "dspark": DSPARK}
OTHERS = ("eagle3",)  # of speculators, families of their own
_DSPARKS = (DSPARK, "Qwen3DSparkModel", "Lfm2DSparkDraftModel")  # of one build
_DFLASH_FIELDS = (
    "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "projector_type", "shift_label", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "sample_from_anchor",
)  # fmt: skip


def parse_fields(raw: Fields) -> NetworkConfig:
    """The configuration in a config.json of any version.

    Raises KeyError for a missing field, ValueError or TypeError for one of the wrong kind or size.
    """
    dflash = raw["dflash_config"]
    if not isinstance(dflash, dict):
        raise ValueError(f"dflash_config is {dflash!r}")
    _check_kind(raw, dflash)
    windows = layer_windows(raw)
    if flag(dflash, "use_swa") and not any(windows):
        raise ValueError("dflash_config.use_swa is true, but layer_types has no sliding_attention")
    either, layers = {**raw, **dflash}, "num_target_layers"
    from_anchor = flag(dflash, "sample_from_anchor")
    return NetworkConfig(
        **shape(raw),
        layer_windows=windows,
        layer_causal=_layer_causal(raw, dflash, windows),
        block_size=whole(either, "block_size") + from_anchor,
        mask_token_id=whole(dflash, "mask_token_id"),
        target_layer_ids=listed(dflash["target_layer_ids"], "target_layer_ids", int),
        num_target_layers=None if raw[layers] is None else size(raw, layers),
        vocab_size=size(raw, "vocab_size"),
        input_embedding_scale=number(dflash, "input_embedding_scale", 1.0, above=0),
        output_multiplier=number(dflash, "output_multiplier", 1.0, above=0),
        final_logit_softcapping=number(either, "final_logit_softcapping", 0.0) or None,
        draft_vocab_size=size(raw, "draft_vocab_size", 0) or None,
        own_embedding=flag(dflash, "own_embedding"),
        own_head=flag(dflash, "own_head"),
        sample_from_anchor=from_anchor,
        **(_second_version(either) if architecture(raw) == VERSION_2 else {}),
        markov=_markov(dflash) if architecture(raw) == DSPARK else None,
        quantization=quantization(raw),
        notes=listed(raw.get("notes") or [], "notes", str),  # what a conversion assumed
    )


def problems(config: NetworkConfig) -> dict[str, Any]:
    """How fields may contradict each other, each with whether they do."""
    width, block = config.hidden_size, config.block_size
    aux_layers, vocabulary, own = (
        config.target_layer_ids,
        config.vocab_size,
        config.draft_vocab_size,
    )
    layers = (
        max(*aux_layers, 0) + 1 if config.num_target_layers is None else config.num_target_layers
    )
    conv, selector = config.convolution or ConvolutionConfig(0, 1), config.selector
    extra = int(config.sample_from_anchor)  # of our blocks; messages name what files have
    top_k, groups = 0 if selector is None else selector.top_k, max(1, width // conv.group_size)
    products = {  # dimensions that MLX may be unable to have although each factor is one
        f"{len(aux_layers)} tapped layers of hidden_size {width}": len(aux_layers) * width,
        f"two convolutions of conv_kernel_size {conv.kernel_size} over {groups} groups":
            2 * conv.kernel_size * groups,
    }  # fmt: skip
    return {
        **shape_problems(config),
        f"block_size is {block - extra}, not from {2 - extra} to {MAX_BLOCK - extra}":
            not 2 <= block <= MAX_BLOCK,
        f"mask_token_id is {config.mask_token_id}, outside the vocabulary of {vocabulary}":
            not 0 <= config.mask_token_id < vocabulary,
        f"target_layer_ids are {list(aux_layers)}, outside the {layers} layers of the target":
            not aux_layers or not all(0 <= tap < layers for tap in aux_layers),
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
        **too_large(products),
    }  # fmt: skip


def _check_kind(raw: Fields, dflash: Fields) -> None:
    """Raise ValueError for another activation and for drafters that only look like this one."""
    check_activation(raw)
    known = "dspark" if architecture(raw) == DSPARK else PROJECTOR
    for fields in (raw, dflash):
        if (kind := fields.get("projector_type") or known) != known:
            raise ValueError(f"projector_type is {kind!r}, supported is {known!r}")
        if flag(fields, "shift_label") and not flag(dflash, "sample_from_anchor"):
            raise ValueError(
                "shift_label is true, but sample_from_anchor is not; supported are drafters that "
                "predict masks, or from each row the token behind it"
            )


def _layer_causal(raw: Fields, dflash: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal` for all layers, or `causal` as vLLM has it; else sliding layers alone are."""
    given, name = (dflash, "causal") if raw.get("is_causal") is None else (raw, "is_causal")
    return tuple(flag(given, name, default=window is not None) for window in windows)


def _second_version(fields: Fields) -> dict[str, Any]:
    aux_layers, group = size(fields, "conv_kernel_size"), size(fields, "conv_group_size")
    rank, top_k = size(fields, "selector_rank"), size(fields, "selector_top_k")
    return {
        "convolution": ConvolutionConfig(aux_layers, group),
        "selector": SelectorConfig(rank, top_k),
    }


def _markov(fields: Fields) -> MarkovConfig | None:
    """Of DSpark's heads; None for a drafter that has none."""
    if (kind := fields.get("markov_head_type") or MARKOV) != MARKOV:
        raise ValueError(f"markov_head_type is {kind!r}, supported is {MARKOV!r}")
    rank = whole(fields, "markov_rank", least=0)
    confidence = flag(fields, "enable_confidence_head", default=True)
    reads_token = flag(fields, "confidence_head_with_markov", default=True)
    if not rank and confidence:
        raise ValueError("markov_rank is 0, but enable_confidence_head is not false")
    return MarkovConfig(rank, confidence, reads_token) if rank else None


def _is_speculators(raw: Any) -> bool:
    return isinstance(raw, dict) and "speculators_model_type" in raw


def tells_by_tensors(raw: Any) -> bool:
    """Whether the names of its tensors say whether a drafter has an embedding and a head."""
    return _is_speculators(raw) or architecture(raw) in _DSPARKS


def translate(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A drafter's config.json in z-lab's format; one that is in it already stays as it is.

    names: of the tensors in its files; () where these are not known. Raises ValueError for a
    speculators drafter of another kind, KeyError for a missing field.
    """
    if not _is_speculators(raw):
        return _from_dspark(raw, names) if architecture(raw) in _DSPARKS else raw
    kind = raw["speculators_model_type"]
    if kind not in _SPECULATORS:
        known = ", ".join([*_SPECULATORS, *OTHERS])
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
    method |= _own_tables(result, names)
    return result


def _from_dspark(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """DSpark's fields in z-lab's places; a folder of ours stays as it is."""
    given = raw.get("dflash_config") or {}
    if not isinstance(given, dict):
        raise ValueError(f"dflash_config is {given!r}")
    if "own_head" in given:
        return raw
    result = {k: v for k, v in raw.items() if k != "draft_vocab_size" or v != raw.get("vocab_size")}
    fields = (*_DFLASH_FIELDS, "target_layer_ids", "num_target_layers")
    method = {"sample_from_anchor": True} | {k: raw[k] for k in fields if raw.get(k) is not None}
    method |= given
    layers = method.pop("num_target_layers")
    return result | {
        "architectures": [DSPARK],
        "num_target_layers": layers,
        "dflash_config": method | _own_tables(result, names),
    }


def _own_tables(told: dict[str, Any], names: Collection[str]) -> dict[str, bool]:
    """Whether a drafter with tensors of these names has an embedding and a head."""
    has_head = told.get("draft_vocab_size") is not None or "lm_head.weight" in names
    return {"own_embedding": "embed_tokens.weight" in names, "own_head": has_head}


def _dflash_config(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of the method, and a note of what had to be assumed."""
    given: dict[str, Any] = {k: raw[k] for k in _DFLASH_FIELDS if raw.get(k) is not None}
    if "sample_from_anchor" not in given:
        given["sample_from_anchor"] = _drafts_every_row(raw)
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
    aux_layers = [i - 1 for i in ids]
    note = f"aux_hidden_state_layer_ids {ids} are taken to number hidden states, so the drafter "
    note += f"reads the outputs of layers {aux_layers}, counted from 0"
    return {**given, "target_layer_ids": aux_layers}, [note]


def _drafts_every_row(raw: dict[str, Any]) -> bool:
    """Whether older speculators files propose as many tokens as their block has rows."""
    method: Any = raw.get("speculators_config")
    proposals = method.get("proposal_methods") if isinstance(method, dict) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return type(tokens) is int and tokens == raw["block_size"]
