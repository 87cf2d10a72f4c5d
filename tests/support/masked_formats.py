"""Tiny random masked diffusion drafters in every format, and what NumPy says that they draft.

The reference knows nothing of caches, chunks or waiting tokens: it computes all of a text and a
block at once, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.specdiff.model import MaskedModel
from dflash_mlx.verifier.model import Target
from support import family_configs
from support.drafter_formats import written
from support.reference_dflash import (
    Array,
    capped,
    decoded,
    layer_shapes,
    random_weights,
)

MASK = 5
BASE = {**family_configs.BASE, "hidden_act": "silu", "num_hidden_layers": 2}
del BASE["head_dim"], BASE["tie_word_embeddings"]
OURS = {**BASE, "architectures": ["MaskedDiffusionDraftModel"], "block_size": 6}
OURS |= {"mask_token_id": MASK, "head_dim": 16}


def ours(**changes: Any) -> dict[str, Any]:
    """Our format, for the tiny llama: its embedding and head."""
    return {**OURS, **changes}


PUBLISHED: dict[str, dict[str, Any]] = {  # what each class has of its own
    "A2DQwen3LMHeadModel": {  # dllm-hub's, by masked diffusion or by blocks
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
        "model_type": "a2d-qwen3",
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    # Of the generation before: heads as wide as hidden_size makes them
    "A2DQwen2LMHeadModel": {"head_dim": None, "hidden_size": 64, "model_type": "a2d-qwen2"},
    "SDARForCausalLM": {"model_type": "sdar"},  # JetLM's
    "Fast_dLLM_QwenForCausalLM": {"bd_size": 6, "model_type": "Fast_dLLM_Qwen"},  # NVIDIA's
    "DreamModel": {"model_type": "Dream", "use_mrope": False, "sliding_window": None},
}


def published(kind: str, **changes: Any) -> dict[str, Any]:
    """A config.json as its authors publish it, of another width than the target's."""
    raw = {
        **BASE,
        "architectures": [kind],
        "auto_map": {"AutoModel": f"modeling.{kind}"},
        "hidden_size": 48,
        "head_dim": 16,
        "mask_token_id": MASK,
        "tie_word_embeddings": False,
        "use_cache": True,
        **PUBLISHED.get(kind, {}),
        **changes,
    }
    return {name: value for name, value in raw.items() if name != "head_dim" or value}


a2d_qwen3, a2d_qwen2, sdar, fast_dllm, dream = (partial(published, kind) for kind in PUBLISHED)


def is_shifted(raw: dict[str, Any]) -> bool:
    return raw["architectures"][0] in ("DreamModel", "Fast_dLLM_QwenForCausalLM") or bool(
        raw.get("logits_shifted")
    )


def tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """Random float32 weights under the names that such a folder has."""
    d, kind = raw["hidden_size"], raw["architectures"][0]
    is_ours, norms, biases = kind == OURS["architectures"][0], "", ""
    if raw.get("attention_bias") or "Qwen2" in kind or "dLLM" in kind or "Dream" in kind:
        biases = "qkv"
    if raw.get("head_norms", kind in ("A2DQwen3LMHeadModel", "SDARForCausalLM")):
        norms, biases = "qk", "qkvo" if raw.get("attention_bias") else biases
    shapes = layer_shapes(raw, norms=norms, biases=biases)
    layers = range(raw["num_hidden_layers"])
    shapes = {f"layers.{i}.{name}": shape for i in layers for name, shape in shapes.items()}
    shapes["norm.weight"] = (d,)
    if not is_ours or raw.get("own_embedding"):
        shapes["embed_tokens.weight"] = (raw["vocab_size"], d)
    if not is_ours:
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    if not raw.get("tie_word_embeddings") and (not is_ours or raw.get("own_head")):
        shapes["lm_head.weight"] = (raw["vocab_size"], d)
    return dict(random_weights(shapes, seed))


def logits(
    raw: dict[str, Any],
    stored: dict[str, Array],
    tables: tuple[Array, Array],
    text: Sequence[int],
    block: Sequence[int],
) -> Array:
    """[b - 1, V] for places 1, 2, ... of a block [b] behind a text, in float64.

    tables: the target's embedding and head, each [V, d].
    """
    named = {n.removeprefix("model."): np.asarray(t, np.float64) for n, t in stored.items()}
    embedding = named.get("embed_tokens.weight", np.asarray(tables[0], np.float64))
    tied = raw.get("tie_word_embeddings") and "embed_tokens.weight" in named
    head = embedding if tied else named.get("lm_head.weight", np.asarray(tables[1], np.float64))
    x, rows = embedding[[*text, *block]], np.arange(len(text) + len(block))
    types = raw.get("layer_types") or ["full_attention"] * raw["num_hidden_layers"]

    def visible(layer: int) -> Array:
        """Text sees what precedes it, the block sees everything; a window cuts both."""
        seen = (rows <= rows[:, None]) | (rows >= len(text))[:, None]
        if types[layer] == "sliding_attention":
            seen &= np.abs(rows - rows[:, None]) < raw["sliding_window"]
        return seen

    states = decoded(named, raw, x, x[:0], visible)[len(text) :]
    return capped((states[:-1] if is_shifted(raw) else states[1:]) @ head.T, raw)


def case(raw: dict[str, Any], **more: Array) -> tuple[dict[str, Any], dict[str, Array]]:
    return raw, {**tensors(raw), **more}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
TIED = a2d_qwen3(tie_word_embeddings=True)
UNTOLD = {k: v for k, v in a2d_qwen3().items() if k != "tie_word_embeddings"}

FORMATS = {
    "ours": case(ours()),
    "ours, head norms and biases": case(ours(head_norms=True, attention_bias=True)),
    "ours, sliding": case(ours(**SLIDING)),
    "ours, shifted": case(ours(logits_shifted=True)),
    "ours, capped": case(ours(final_logit_softcapping=3.0)),
    "ours, own tables": case(ours(own_embedding=True, own_head=True, hidden_size=48)),
    "a2d-qwen3": case(a2d_qwen3()),
    "a2d-qwen3, tied": case(TIED),
    "a2d-qwen3, tied with a copy": case(
        TIED, **{"lm_head.weight": tensors(TIED)["model.embed_tokens.weight"]}
    ),
    "a2d-qwen3, ties not told": case({**UNTOLD, "block_size": 6}),
    "a2d-qwen2": case(a2d_qwen2()),
    "a2d-llama": case(published("A2DLlamaLMHeadModel")),
    "sdar": case(sdar(block_size=6)),
    "fast-dllm": case(fast_dllm()),
    "dream": case(dream()),
}


def small(place: Path, target: Target, **settings: Any) -> MaskedModel:
    """A drafter of `target` in our format, blocks of 8."""
    width = target.embedding()(mx.array([0])).shape[-1]
    raw = ours(block_size=8, hidden_size=width)
    return written(place, raw, tensors(raw), target, **settings)  # type: ignore[no-any-return]
