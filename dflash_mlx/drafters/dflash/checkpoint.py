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

Domino's have z-lab's layout, with `projector_type` "domino" ("causal_v5" in the first of them).
Their `shift_label` says the same as `sample_from_anchor`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.dflash import fields as own
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.domino import DominoConfig
from dflash_mlx.drafters.dflash.network import ConvolutionConfig, Network, NetworkConfig
from dflash_mlx.drafters.dflash.paths import MarkovConfig, SelectorConfig
from dflash_mlx.drafters.formats import SPECULATORS, FileFormat, left_by_training
from dflash_mlx.drafters.networks.fields import (
    Fields,
    architecture,
    flag,
    size,
    size_or_none,
    stored_shape,
    whole,
)

PROJECTOR = "dflash"
_PROJECTORS = {  # others have the first
    own.VERSION_2: (PROJECTOR, "dflash2"),
    own.DSPARK: ("dspark",),
    own.DOMINO: (own.PROJECTOR_DOMINO,),
}
MARKOV = "vanilla"
_CODEBOOK = "_codebook.weight"
_CONFIDENCE = "confidence_head.proj.weight"
_RENAMED = {  # beginnings of names in other files
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",  # SpecForge's first
}


class BlockFiles(FileFormat):
    """DFlash, DFlash 2, DSpark and Domino."""

    config, network, model = NetworkConfig, Network, BlockModel
    known = (own.VERSION_1, own.VERSION_2, own.DSPARK, own.DOMINO)
    speculators = tuple(own.OF_SPECULATORS)
    classes = ((f".*DFlash.*|.*DSpark.*|.*Domino.*|{own.MUSE}", ""), (".*", "dflash_config"))
    marks = ("dflash_config", SPECULATORS, "speculators_config")

    def review(self, raw: Fields, names: Collection[str]) -> Iterable[str]:
        is_other = raw.get(SPECULATORS) not in (None, *self.speculators)  # and refused for that
        return () if is_other else own.review(raw, names, SPECULATORS in raw)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        return own.in_our_words(raw, names)

    def read_fields(self, told: Fields, names: Collection[str]) -> NetworkConfig:
        if not isinstance(method := told["dflash_config"], dict):
            raise ValueError(f"dflash_config is {method!r}")
        kind, fields = architecture(told), {**told, **method}
        _check_kind(told, method)
        if fields.get("target_layer_ids") is None and "layer_ids" in fields:
            fields["target_layer_ids"] = fields["layer_ids"]
        windows, causal = own.block_attention(fields)
        from_anchor = own.drafts_from_anchor(fields)
        return NetworkConfig.read(
            fields,
            layer_windows=windows,
            layer_causal=causal,
            sample_from_anchor=from_anchor,
            block_size=whole(fields, "block_size") + from_anchor,
            **(_second_version(fields) if kind == own.VERSION_2 else {}),
            **(_dspark(fields, names) if kind == own.DSPARK else {}),
            domino=_domino(fields) if kind == own.DOMINO else None,
        )

    def our_names(self, names: Collection[str]) -> dict[str, str]:
        # speculators keeps the selector's codebooks as embeddings
        plain = {n: n.removesuffix(".weight") if n.endswith(_CODEBOOK) else n for n in names}
        plain = {n: _renamed(p) for n, p in plain.items()}
        return {n: n if ours != n and ours in names else ours for n, ours in plain.items()}

    def optional(self, config: NetworkConfig) -> dict[str, str]:
        return left_by_training(config.hidden_size, config.drafted)

    def settle(self, network: Network, config: NetworkConfig) -> Network:
        if config.offset_norms:
            network.add_one_to_norms()
        network.drop_idle_convolutions(config)
        mx.eval(network.parameters())
        return network


FILES = BlockFiles()


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _check_kind(raw: Fields, method: Fields) -> None:
    """Raise ValueError for drafters that only look like this one."""
    supported = _PROJECTORS.get(architecture(raw), (PROJECTOR,))
    for fields in (raw, method):
        if (kind := fields.get("projector_type") or supported[0]) not in supported:
            raise ValueError(f"projector_type is {kind!r}, supported is {supported[-1]!r}")
        if flag(fields, "shift_label") and not own.drafts_from_anchor({**raw, **method}):
            raise ValueError(
                "shift_label is true, but sample_from_anchor is not; supported are drafters that "
                "predict masks, or from each row the token behind it"
            )
        own.check_width(fields.get("target_hidden_size"), raw.get("hidden_size"))


def _second_version(fields: Fields) -> dict[str, Any]:
    names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    taps, group, rank, top_k = (size(fields, name) for name in names)
    selector = SelectorConfig(rank, top_k, size_or_none(fields, "selector_vocab_size"))
    return {"convolution": ConvolutionConfig(taps, group), "selector": selector}


def _domino(fields: Fields) -> DominoConfig:
    pure = whole(fields, "pure_draft_prefix_len", default=0, least=0)
    return DominoConfig(size(fields, "emb_dim"), size(fields, "gru_hidden_dim"), pure)


def _dspark(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """DSpark's heads, and what its layers may have of Qwen3.5's own."""
    turned = own.rotary_dims(fields) if own.is_native_35(fields, names) else None
    layers = {"gated": own.is_gated(fields, names), "rotary_dims": turned}
    return {**layers, "markov": _markov(fields, names)}


def _markov(fields: Fields, names: Collection[str]) -> MarkovConfig | None:
    """Of DSpark's heads; None for a drafter that has none.

    What a file does not say of the confidence head, which published programs take either way, its
    tensors show.
    """
    if (kind := fields.get("markov_head_type") or MARKOV) != MARKOV:
        raise ValueError(f"markov_head_type is {kind!r}, supported is {MARKOV!r}")
    rank = whole(fields, "markov_rank", least=0)
    stored = next((name for name in names if name.endswith(_CONFIDENCE)), None)
    found = flag(fields, "use_confidence_head", bool(stored) if names else rank > 0)  # NVIDIA's
    confidence = flag(fields, "enable_confidence_head", found)
    shape = stored_shape(names, stored or "")
    with_token = shape is None or shape[-1] != size(fields, "hidden_size")
    reads_token = flag(fields, "confidence_head_with_markov", default=with_token)
    if not rank and confidence:
        raise ValueError("markov_rank is 0, but enable_confidence_head is not false")
    return MarkovConfig(rank, confidence, reads_token) if rank else None
