"""The fields of an assistant's config.json: which are read, and which ask for something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_mlx.drafters.networks.fields import FULL, Fields, part
from dflash_mlx.drafters.networks.known_fields import LIBRARY, Part, Refused

TEXT = "text_config"
BY_LAYER = "per_layer_config"  # what newer files of transformers have for full attention
_ACTIVATION = "gelu_pytorch_tanh"
_TOKENS = frozenset({  # of the target's vocabulary, with no meaning here
    "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index",
    "eoi_token_id", "image_token_id", "video_token_id",
})  # fmt: skip
_UNTIED = Refused("but the head is the embedding here", (None, True))
_IN_FILE = Part(
    read={
        TEXT, "architectures", "model_type", "backbone_hidden_size", "block_size", "notes",
        "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k",
        "quantization", "quantization_config",
    },
    silent=LIBRARY | _TOKENS,
    refused={"tie_word_embeddings": _UNTIED},
)  # fmt: skip
_IN_TEXT = Part(
    read={
        "attention_bias", "attention_k_eq_v", "global_head_dim", "head_dim", "hidden_size",
        "intermediate_size", "layer_types", "max_position_embeddings", "num_attention_heads",
        "num_global_key_value_heads", "num_hidden_layers", "num_key_value_heads",
        "num_kv_shared_layers", "rms_norm_eps", "rope_parameters", "sliding_window", "vocab_size",
        BY_LAYER,
    },
    # transformers takes the head's logits as they are; the second is a target's
    noted={"final_logit_softcapping", "sliding_window_pattern"},
    silent=LIBRARY | _TOKENS | {
        "moe_intermediate_size", "num_experts", "top_k_experts", "vocab_size_per_layer_input",
    },
    refused={
        "hidden_size_per_layer_input": Refused("but inputs of each layer are not supported"),
        "enable_moe_block": Refused("but a mixture of experts is not supported"),
        "use_double_wide_mlp": Refused("but MLPs of twice the size are not supported"),
        "rope_traditional": Refused("but neighbours do not turn together here"),
        "use_bidirectional_attention": Refused("of a drafter that looks ahead", (None, "vision")),
        "hidden_activation": Refused(f"supported is {_ACTIVATION!r}", (None, _ACTIVATION)),
        "tie_word_embeddings": _UNTIED,
    },
)  # fmt: skip


def review(raw: Fields) -> Iterator[str]:
    """The fields that change nothing; Unsupported for one that is not known."""
    yield from _IN_FILE.review(raw)
    yield from _IN_TEXT.review(part(raw, TEXT), TEXT)


def of_full_layers(text: Fields, types: tuple[Any, ...]) -> Fields:
    """`text` with the sizes of full attention beside the others, where the file lists layers."""
    listed = part(text, BY_LAYER)
    found: set[tuple[tuple[str, Any], ...]] = set()
    for layer, own in listed.items():
        sizes, full = dict(own), (str(i) for i, kind in enumerate(types) if kind == FULL)
        if layer not in full or not sizes.keys() <= {"head_dim", "num_key_value_heads"}:
            raise ValueError(f"{BY_LAYER} is {listed!r}, not of sizes of full attention alone")
        found.add(tuple(sorted(sizes.items())))
    if len(found) > 1:
        raise ValueError(f"{BY_LAYER} is {listed!r}, of layers that differ")
    sizes = dict(next(iter(found), ()))
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return {**text, **{names[name]: size for name, size in sizes.items()}}
