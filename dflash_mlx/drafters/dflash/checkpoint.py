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

from dflash_mlx.drafters.dflash import fields as own
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.network import ConvolutionConfig, Network, NetworkConfig
from dflash_mlx.drafters.dflash.paths import MarkovConfig, SelectorConfig
from dflash_mlx.drafters.formats import (
    SPECULATORS,
    FileFormat,
    layers_of_speculators,
    left_by_training,
)
from dflash_mlx.drafters.networks.fields import (
    SLIDING,
    Fields,
    architecture,
    flag,
    layers_of_states,
    named,
    part,
    size,
    size_or_none,
    stored_shape,
    whole,
)
from dflash_mlx.drafters.networks.known_fields import Unsupported

VERSION_1, VERSION_2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"
PROJECTOR = "dflash"
_PROJECTORS = {VERSION_2: (PROJECTOR, "dflash2"), DSPARK: ("dspark",)}  # others have the first
MARKOV = "vanilla"
_OF_SPECULATORS = {"dflash": VERSION_1, "dflash2": VERSION_2, "dspark": DSPARK}
_ALIASES = {  # classes of the same networks
    "Qwen3DFlashDraftModel": VERSION_1,
    "Qwen3DFlash2DraftModel": VERSION_2,
    "Qwen3DSparkModel": DSPARK,
    "Qwen35DSparkModel": DSPARK,  # Qwen3's layers or Qwen3.5's own, see `own.is_native_35`
    "Lfm2DSparkDraftModel": DSPARK,
    "Qwen3DFlashModel": DSPARK,  # without its heads
}
_MUSE, _GEMMA = "MuseGlimmerAssistantModel", "Gemma4DSparkModel"
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
_CODEBOOK = "_codebook.weight"
_CONFIDENCE = "confidence_head.proj.weight"
_RENAMED = {  # beginnings of names in other files
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",  # SpecForge's first
}


class BlockFiles(FileFormat):
    """DFlash, DFlash 2 and DSpark."""

    config, network, model = NetworkConfig, Network, BlockModel
    known = (VERSION_1, VERSION_2, DSPARK)
    speculators = tuple(_OF_SPECULATORS)
    classes = ((f".*DFlash.*|.*DSpark.*|{_MUSE}", ""), (".*", "dflash_config"))
    marks = ("dflash_config", SPECULATORS, "speculators_config")

    def review(self, raw: Fields, names: Collection[str]) -> tuple[str, ...]:
        is_other = raw.get(SPECULATORS) not in (None, *self.speculators)  # and refused for that
        return () if is_other else own.review(raw, names, SPECULATORS in raw)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        if SPECULATORS in raw:
            return _from_speculators(raw, names)
        if (name := architecture(raw)) == _MUSE:
            return _from_muse(raw)
        if name == _GEMMA:
            return _from_dspark(_from_gemma(raw, names), names)
        kind = DSPARK if _has_markov(raw) else _ALIASES.get(name, name)
        told = raw if kind == name else {**raw, "architectures": [kind]}
        return _from_dspark(told, names) if kind == DSPARK else told

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
            **(_second_version(fields) if kind == VERSION_2 else {}),
            **(_dspark(fields, names) if kind == DSPARK else {}),
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
        _check_width(fields.get("target_hidden_size"), raw.get("hidden_size"))


def _check_width(target_width: Any, width: Any) -> None:
    if target_width not in (None, width):
        raise ValueError(
            f"target_hidden_size is {target_width!r} and hidden_size {width!r}; a drafter of "
            "another width than its target's is not supported"
        )


def _has_markov(raw: Fields) -> bool:
    """Whether a file of the first version's class is DSpark's, by its Markov head.

    Raises Unsupported where it does not say which rows of its block draft: such files do it either
    way, and the wrong one drafts every token a place too early.
    """
    fields, kind = {**raw, **part(raw, "dflash_config")}, architecture(raw)
    if _ALIASES.get(kind, kind) != VERSION_1 or not (rank := fields.get("markov_rank")):
        return False
    if not own.has_anchor(fields) and fields.get("projector_type") != "dspark":
        raise Unsupported(
            f"markov_rank is {rank!r} in a {kind}, and nothing says which rows draft",
            "add sample_from_anchor to its dflash_config: true where a block of 7 drafts 7 tokens, "
            "as DSpark's do, false where it drafts 6",
        )
    return True


def _second_version(fields: Fields) -> dict[str, Any]:
    names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    taps, group, rank, top_k = (size(fields, name) for name in names)
    selector = SelectorConfig(rank, top_k, size_or_none(fields, "selector_vocab_size"))
    return {"convolution": ConvolutionConfig(taps, group), "selector": selector}


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


def _from_speculators(raw: Fields, names: Collection[str]) -> Fields:
    layers, kind = layers_of_speculators(raw), raw[SPECULATORS]
    _check_width(raw.get("target_hidden_size"), layers["hidden_size"])
    method: Fields = named(raw, own.BESIDE) | part(raw, "dflash_config")
    if not own.has_anchor(method):
        method["sample_from_anchor"] = _drafts_every_row(raw)
    notes = []
    if "target_layer_ids" not in method:
        name = "aux_hidden_state_layer_ids"
        method["target_layer_ids"], note = layers_of_states(raw[name], name, _HINT)
        notes.append(note)
    result = {
        **layers,
        **named(raw, own.WINDOWS),
        "architectures": [_OF_SPECULATORS[kind]],
        "block_size": raw["block_size"],
        "num_target_layers": raw.get("num_target_layers"),
        "notes": notes,
        **named(raw, ("quantization", "quantization_config")),
    }
    apart = flag(raw, "sliding_window_non_causal", default=kind == "dflash2")
    if apart and not named(method, own.CAUSAL):
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
    method = named(raw, (*own.BESIDE, "target_layer_ids", "num_target_layers")) | given
    if not own.has_anchor(method):
        method["sample_from_anchor"] = True
    method.setdefault("markov_rank", raw.get("dspark_markov_rank") or 0)
    layers = method.pop("num_target_layers", None)
    return result | {
        "architectures": [DSPARK],
        "num_target_layers": layers,
        own.OFFSET: raw.get("model_type") == own.NATIVE,
        "dflash_config": method | _own_tables(result, names),
    }


def _from_muse(raw: Fields) -> Fields:
    """The assistant of Muse-Glimmer, a DFlash with its target's numbers left out."""
    inner = named(raw, ("block_size", "mask_token_id", "target_layer_ids"))
    target = {name: raw.get(name, value) for name, value in _MUSE_TARGET.items()}
    ours = {"architectures": [VERSION_1], "is_causal": False, "dflash_config": inner}
    return {**raw, **target, **ours}


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


def _drafts_every_row(raw: Fields) -> bool:
    """Whether older speculators files propose as many tokens as their block has rows."""
    method: Any = raw.get("speculators_config")
    proposals = method.get("proposal_methods") if isinstance(method, dict) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return type(tokens) is int and tokens == raw["block_size"]
