"""The files of DFlash's family, all read in the words of z-lab's DFlash and DFlash 2 folders.

There fields of the method are in `dflash_config`; older and newer files have some of them beside
it. Variable-prefix drafters have the same format, and so have our own folders, with weights that
MLX may have packed.

Folders of vLLM's speculators have the network under `transformer_layer_config`, what makes it a
drafter beside that. Tensors have z-lab's names; embedding and head may be among them, and a reduced
draft vocabulary with `d2t`. A file whose layers are numbered otherwise than hidden states can say
so: `dflash_config.target_layer_ids` in it is taken as it is.

Of DSpark's files DeepSeek's have the fields of the method beside those of the network, others as
z-lab has them. Their `block_size` counts the rows of the network's block. Each row drafts the token
behind it, the anchor's too (`sample_from_anchor`), so a block of 7 drafts 7 tokens and is one of 8
here. Speculators files that do not have that field are from before there was one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.network import ConvolutionConfig, Network, NetworkConfig
from dflash_mlx.drafters.dflash.paths import MarkovConfig, SelectorConfig
from dflash_mlx.drafters.formats import (
    SPECULATORS,
    FileFormat,
    layers_of_speculators,
    left_by_training,
)
from dflash_mlx.drafters.networks.files import (
    Fields,
    architecture,
    flag,
    layer_windows,
    layers_of_states,
    part,
    size,
    whole,
)

VERSION_1, VERSION_2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"
PROJECTOR = "dflash"
MARKOV = "vanilla"
_OF_SPECULATORS = {"dflash": VERSION_1, "dflash2": VERSION_2, "dspark": DSPARK}
_DSPARKS = (DSPARK, "Qwen3DSparkModel", "Lfm2DSparkDraftModel")  # of one build
_METHOD = (  # what may be beside `dflash_config`
    "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "projector_type", "shift_label", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "sample_from_anchor",
)  # fmt: skip
_HINT = (
    "; they number hidden states from the output of the embedding, 0, which no drafter reads (if "
    "these number layers, add them as dflash_config.target_layer_ids)"
)
_CODEBOOK = "_codebook.weight"


class BlockFiles(FileFormat):
    """DFlash, DFlash 2 and DSpark."""

    config, network, model = NetworkConfig, Network, BlockModel
    known = (VERSION_1, VERSION_2, DSPARK)
    speculators = tuple(_OF_SPECULATORS)
    classes = (("DFlash.*|.*DSpark.*", ""), (".*", "dflash_config"))
    marks = ("dflash_config", SPECULATORS, "speculators_config")

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        if SPECULATORS in raw:
            return _from_speculators(raw, names)
        return _from_dspark(raw, names) if architecture(raw) in _DSPARKS else raw

    def read_fields(self, told: Fields, names: Collection[str]) -> NetworkConfig:
        if not isinstance(method := told["dflash_config"], dict):
            raise ValueError(f"dflash_config is {method!r}")
        kind, fields = architecture(told), {**told, **method}
        _check_kind(told, method)
        windows = layer_windows(told)
        if flag(method, "use_swa") and not any(windows):
            what = "dflash_config.use_swa is true, but layer_types has no sliding_attention"
            raise ValueError(what)
        # `is_causal` for all layers, or `causal` as vLLM has it; else sliding layers alone are
        causal = "causal" if told.get("is_causal") is None else "is_causal"
        return NetworkConfig.read(
            fields,
            layer_causal=tuple(flag(fields, causal, window is not None) for window in windows),
            block_size=whole(fields, "block_size") + flag(method, "sample_from_anchor"),
            **(_second_version(fields) if kind == VERSION_2 else {}),
            markov=_markov(method) if kind == DSPARK else None,
        )

    def our_names(self, names: Collection[str]) -> dict[str, str]:
        # speculators keeps the selector's codebooks as embeddings
        plain = {n: n.removesuffix(".weight") if n.endswith(_CODEBOOK) else n for n in names}
        return {n: n if ours != n and ours in names else ours for n, ours in plain.items()}

    def optional(self, config: NetworkConfig) -> dict[str, str]:
        return left_by_training(config.hidden_size, config.drafted)

    def settle(self, network: Network, config: NetworkConfig) -> Network:
        network.drop_idle_convolutions(config)
        mx.eval(network.parameters())
        return network


FILES = BlockFiles()


def _check_kind(raw: Fields, method: Fields) -> None:
    """Raise ValueError for drafters that only look like this one."""
    known = "dspark" if architecture(raw) == DSPARK else PROJECTOR
    for fields in (raw, method):
        if (kind := fields.get("projector_type") or known) != known:
            raise ValueError(f"projector_type is {kind!r}, supported is {known!r}")
        if flag(fields, "shift_label") and not flag(method, "sample_from_anchor"):
            raise ValueError(
                "shift_label is true, but sample_from_anchor is not; supported are drafters that "
                "predict masks, or from each row the token behind it"
            )


def _second_version(fields: Fields) -> dict[str, Any]:
    names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    taps, group, rank, top_k = (size(fields, name) for name in names)
    convolution, selector = ConvolutionConfig(taps, group), SelectorConfig(rank, top_k)
    return {"convolution": convolution, "selector": selector}


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


def _from_speculators(raw: Fields, names: Collection[str]) -> Fields:
    layers, kind = layers_of_speculators(raw), raw[SPECULATORS]
    width, target_width = layers["hidden_size"], raw.get("target_hidden_size")
    if target_width not in (None, width):
        raise ValueError(
            f"target_hidden_size is {target_width!r} and hidden_size {width!r}; a drafter of "
            "another width than its target's is not supported"
        )
    method: Fields = {"sample_from_anchor": _drafts_every_row(raw), **_given(raw, _METHOD)}
    method |= part(raw, "dflash_config")
    notes = []
    if "target_layer_ids" not in method:
        name = "aux_hidden_state_layer_ids"
        method["target_layer_ids"], note = layers_of_states(raw[name], name, _HINT)
        notes.append(note)
    result = {
        **layers,
        "architectures": [_OF_SPECULATORS[kind]],
        "block_size": raw["block_size"],
        "num_target_layers": raw.get("num_target_layers"),
        "notes": notes,
    }
    if flag(raw, "sliding_window_non_causal", default=kind == "dflash2"):
        result["is_causal"] = False
    rope = layers.get("rope_parameters")
    if isinstance(rope, dict) and "sliding_attention" in rope:
        result["rope_parameters"] = rope["sliding_attention"]  # as the library itself does
    if (drafted := raw.get("draft_vocab_size")) not in (None, layers["vocab_size"]):
        result["draft_vocab_size"] = drafted
    return {**result, "dflash_config": method | _own_tables(result, names)}


def _from_dspark(raw: Fields, names: Collection[str]) -> Fields:
    """DSpark's fields in z-lab's places; a folder of ours stays as it is."""
    given = part(raw, "dflash_config")
    if "own_head" in given:
        return raw
    result = {k: v for k, v in raw.items() if k != "draft_vocab_size" or v != raw.get("vocab_size")}
    method = {"sample_from_anchor": True}
    method |= _given(raw, (*_METHOD, "target_layer_ids", "num_target_layers")) | given
    layers = method.pop("num_target_layers")
    return result | {
        "architectures": [DSPARK],
        "num_target_layers": layers,
        "dflash_config": method | _own_tables(result, names),
    }


def _given(raw: Fields, names: Collection[str]) -> Fields:
    return {name: raw[name] for name in names if raw.get(name) is not None}


def _own_tables(told: Fields, names: Collection[str]) -> dict[str, bool]:
    """Whether a drafter with tensors of these names has an embedding and a head."""
    has_head = told.get("draft_vocab_size") is not None or "lm_head.weight" in names
    return {"own_embedding": "embed_tokens.weight" in names, "own_head": has_head}


def _drafts_every_row(raw: Fields) -> bool:
    """Whether older speculators files propose as many tokens as their block has rows."""
    method: Any = raw.get("speculators_config")
    proposals = method.get("proposal_methods") if isinstance(method, dict) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return type(tokens) is int and tokens == raw["block_size"]
