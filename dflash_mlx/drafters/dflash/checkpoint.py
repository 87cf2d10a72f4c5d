"""The files of DFlash's family, all read in the words of z-lab's DFlash and DFlash 2 folders.

There fields of the method are in `dflash_config`, and tensors have the network's names. What others
have instead, and what each field means, is on the page of formats (docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from dflash_mlx.drafters.dflash import fields as own
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.formats import SPECULATORS, FileFormat, left_by_training
from dflash_mlx.drafters.networks.fields import (
    Fields,
    architecture,
    flag,
    size,
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
        return own.review(raw, names)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        return own.in_our_words(raw, names)

    def read_fields(self, told: Fields, names: Collection[str]) -> NetworkConfig:
        if not isinstance(method := told["dflash_config"], dict):
            raise ValueError(f"dflash_config is {method!r}")
        kind, fields = architecture(told), {**told, **method}
        for each in ({**method, **told}, fields):  # where a field is in both places, either one
            _check_kind(each)
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
            **{name: read(fields, name) for name, read in own.HEADS.get(kind, {}).items()},
            **(_dspark(fields, names) if kind == own.DSPARK else {}),
        )

    def our_names(self, names: Collection[str]) -> dict[str, str]:
        # speculators keeps the selector's codebooks as embeddings
        plain = {n: n.removesuffix(".weight") if n.endswith(_CODEBOOK) else n for n in names}
        plain = {n: _renamed(p) for n, p in plain.items()}
        return {n: n if ours != n and ours in names else ours for n, ours in plain.items()}

    def optional(self, config: NetworkConfig) -> dict[str, str]:
        return left_by_training(config.hidden_size, config.drafted)

    def settle(self, network: Network, config: NetworkConfig) -> Any:
        if config.offset_norms:
            network.add_one_to_norms()
        network.drop_idle_convolutions(config)
        return super().settle(network, config)


FILES = BlockFiles()


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _check_kind(fields: Fields) -> None:
    """Raise ValueError for drafters that only look like this one."""
    supported = _PROJECTORS.get(architecture(fields), (PROJECTOR,))
    if (kind := fields.get("projector_type") or supported[0]) not in supported:
        raise ValueError(f"projector_type is {kind!r}, supported is {supported[-1]!r}")
    if flag(fields, "shift_label") and not own.drafts_from_anchor(fields):
        raise ValueError(
            "shift_label is true, but sample_from_anchor is not; supported are drafters that "
            "predict masks, or from each row the token after it"
        )
    if (width := fields.get("target_hidden_size")) not in (None, fields["hidden_size"]):
        raise ValueError(
            f"target_hidden_size is {width!r} and hidden_size {fields['hidden_size']!r}; a drafter "
            "of another width than its target's is not supported"
        )


def _dspark(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """DSpark's heads, and what its layers may have of Qwen3.5's own.

    What a file does not say of the confidence head, which published programs take either way, its
    tensors show.
    """
    if (kind := fields.get("markov_head_type") or MARKOV) != MARKOV:
        raise ValueError(f"markov_head_type is {kind!r}, supported is {MARKOV!r}")
    rank = whole(fields, "markov_rank", least=0)
    stored = next((name for name in names if name.endswith(_CONFIDENCE)), None)
    found = flag(fields, "use_confidence_head", bool(stored) if names else rank > 0)  # NVIDIA's
    confidence = flag(fields, "enable_confidence_head", found)
    if not rank and confidence:
        raise ValueError("markov_rank is 0, but enable_confidence_head is not false")
    shape = stored_shape(names, stored or "")
    with_token = shape is None or shape[-1] != size(fields, "hidden_size")
    return {
        "gated": own.is_gated(fields, names),
        "rotary_dims": own.rotary_dims(fields) if own.is_native_35(fields, names) else None,
        "markov_rank": rank,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": flag(fields, "confidence_head_with_markov", with_token),
    }
