"""The layouts of DFlash's family in the words of z-lab's: the same fields in other places."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dflash_mlx.drafters.dflash import fields as own
from dflash_mlx.drafters.formats import SPECULATORS, layers_of_speculators, proposed_tokens
from dflash_mlx.drafters.networks.fields import (
    SLIDING,
    Fields,
    architecture,
    flag,
    layers_of_states,
    named,
    part,
    size,
)
from dflash_mlx.drafters.networks.known_fields import Unsupported

VERSION_1, VERSION_2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"
DOMINO = "DominoDraftModel"
OF_SPECULATORS = {"dflash": VERSION_1, "dflash2": VERSION_2, "dspark": DSPARK}
_ALIASES = {  # classes of the same networks
    "Qwen3DFlashDraftModel": VERSION_1,
    "Qwen3DFlash2DraftModel": VERSION_2,
    "Qwen3DSparkModel": DSPARK,
    "Qwen35DSparkModel": DSPARK,  # Qwen3's layers or Qwen3.5's own, see `own.is_native_35`
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


def in_our_words(raw: Fields, names: Collection[str]) -> Fields:
    """A config.json in z-lab's words; raises as `FileFormat.translate`."""
    if SPECULATORS in raw:
        return _from_speculators(raw, names)
    if (name := architecture(raw)) == MUSE:
        return _from_muse(raw)
    if name == _GEMMA:
        return _from_dspark(_from_gemma(raw, names), names)
    kind = _ALIASES.get(name, name)
    if own.is_domino(raw) and kind in (VERSION_1, DOMINO):
        return _from_domino(raw)
    kind = DSPARK if _has_markov(raw) else kind
    told = raw if kind == name else {**raw, "architectures": [kind]}
    return _from_dspark(told, names) if kind == DSPARK else told


def check_width(target_width: Any, width: Any) -> None:
    """Raise ValueError for a drafter of another width than its target's."""
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


def _from_domino(raw: Fields) -> Fields:
    """Domino's, which say by `shift_label` which rows draft, and some fields in two places."""
    method = named(raw, own.BESIDE) | part(raw, own.METHOD)
    shifted = flag(method, "shift_label")
    if own.has_anchor(method) and own.drafts_from_anchor(method) != shifted:
        raise ValueError(f"shift_label is {shifted}, which {named(method, own.ANCHOR)} contradict")
    method |= {"projector_type": own.DOMINO, "sample_from_anchor": shifted}
    return {**raw, "architectures": [DOMINO], own.METHOD: method}


def _from_speculators(raw: Fields, names: Collection[str]) -> Fields:
    layers, kind = layers_of_speculators(raw), raw[SPECULATORS]
    check_width(raw.get("target_hidden_size"), layers["hidden_size"])
    method: Fields = named(raw, own.BESIDE) | part(raw, "dflash_config")
    if not own.has_anchor(method):
        # Older files propose as many tokens as their block has rows where each of them drafts
        method["sample_from_anchor"] = proposed_tokens(raw) == raw["block_size"]
    notes = []
    if "target_layer_ids" not in method:
        name = "aux_hidden_state_layer_ids"
        method["target_layer_ids"], note = layers_of_states(raw[name], name, _HINT)
        notes.append(note)
    result = {
        **layers,
        **named(raw, own.WINDOWS),
        "architectures": [OF_SPECULATORS[kind]],
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
