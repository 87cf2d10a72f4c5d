"""The files of Gemma 4's assistants, as Google publishes them and others convert them for MLX."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.core.errors import DFlashError, Finding
from dflash_mlx.drafters.assistant.model import AssistantModel
from dflash_mlx.drafters.assistant.network import AssistantConfig, Network
from dflash_mlx.drafters.formats import CHOOSE_ANOTHER, FileFormat
from dflash_mlx.drafters.networks.fields import (
    FULL,
    LIBRARY,
    SLIDING,
    Fields,
    Part,
    Refused,
    flag,
    layer_windows,
    part,
    rope,
    size,
)
from dflash_mlx.drafters.networks.files import (
    DOWNLOAD_AGAIN,
    FLOATING,
    Arrays,
    DraftConfig,
    in_words,
)

DEFAULT_BLOCK = 8  # files do not say; transformers drafts so many with the larger ones
_CLASSES = {
    "gemma4_assistant": "Gemma4AssistantForCausalLM",
    "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
}
_TEXT = "text_config"
_BY_LAYER = "per_layer_config"  # what newer files of transformers have for full attention
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
_ACTIVATION = "gelu_pytorch_tanh"
_TOKENS = frozenset({  # of the target's vocabulary, with no meaning here
    "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index",
    "eoi_token_id", "image_token_id", "video_token_id",
})  # fmt: skip
_UNTIED = Refused("but the head is the embedding here", (None, True))
_IN_FILE = Part(
    read={
        _TEXT, "architectures", "model_type", "backbone_hidden_size", "block_size", "notes",
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
        _BY_LAYER,
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
_ORDERING = "masked_embedding.token_ordering"


class AssistantFiles(FileFormat):
    """`gemma4_assistant` and `gemma4_unified_assistant`, which differ in their targets alone."""

    config, network, model = AssistantConfig, Network, AssistantModel
    known = tuple(_CLASSES.values())
    classes, model_types = (("|".join(known), ""),), tuple(_CLASSES)

    def review(self, raw: Fields, names: Collection[str]) -> Iterator[str]:
        yield from _IN_FILE.review(raw)
        yield from _IN_TEXT.review(part(raw, _TEXT), _TEXT)

    def translate(self, raw: Fields, names: Collection[str]) -> Fields:
        kind = str(raw.get("model_type"))
        return {"architectures": [_CLASSES[kind]], **raw} if kind in _CLASSES else raw

    def read_fields(self, told: Fields, names: Collection[str]) -> AssistantConfig:
        text = part(told, _TEXT)
        layers, windows = size(text, "num_hidden_layers"), layer_windows(text)
        types = tuple(SLIDING if window else FULL for window in windows)
        if text.get("num_kv_shared_layers") not in (None, 0, layers):
            shared = text["num_kv_shared_layers"]
            raise ValueError(f"num_kv_shared_layers is {shared!r}, not all of {layers}")
        ordered, text = flag(told, "use_ordered_embeddings"), _of_full_layers(text, types)
        heads = size(text, "num_key_value_heads")
        of_full = size(text, "num_global_key_value_heads", heads)
        packed = {name: told.get(name) for name in ("quantization", "quantization_config")}
        return AssistantConfig.read(
            {**text, **packed, "notes": told.get("notes")},
            backbone_hidden_size=size(told, "backbone_hidden_size"),
            head_dim=size(text, "head_dim", 256),
            full_head_dim=size(text, "global_head_dim", 512),
            full_kv_heads=of_full if flag(text, "attention_k_eq_v") else heads,
            layer_types=types,
            layer_windows=windows,
            rope={kind: _rope(text, kind) for kind in types},
            block_size=size(told, "block_size", DEFAULT_BLOCK),
            centroids=size(told, "num_centroids", 2048) if ordered else None,
            chosen=size(told, "centroid_intermediate_top_k", 32),
            own_head=True,
        )

    def optional(self, config: AssistantConfig) -> dict[str, str]:
        return {"lm_head.weight": in_words(FLOATING, (config.vocab_size, config.hidden_size))}

    def read_tensors(self, folder: Path, config: DraftConfig) -> Arrays:
        tensors = super().read_tensors(folder, config)
        if (ordering := tensors.get(_ORDERING)) is not None:
            tokens = np.sort(np.array(ordering))
            if not np.array_equal(tokens, np.arange(config.vocab_size)):
                what = f"{_ORDERING} in {folder} does not have each of {config.vocab_size} tokens"
                raise DFlashError(f"{what} once", DOWNLOAD_AGAIN)
        return tensors

    def misfits(
        self, config: Any, target: Mapping[str, Any], name: str, drafter: str = ""
    ) -> Iterator[Finding]:
        yield from super().misfits(config, target, name, drafter)
        who = f"the assistant {drafter}".rstrip()
        if not str(kind := target.get("model_type")).startswith("gemma4"):
            what = f"{who} is for targets of Gemma 4, but {name} is of {str(kind)[:80]}"
            yield Finding("error", what, CHOOSE_ANOTHER)
            return
        for what in _other_keys(config, target, name):
            yield Finding("error", f"{who} reads {what}", CHOOSE_ANOTHER)


FILES = AssistantFiles()


def _rope(text: Fields, kind: str) -> dict[str, Any]:
    """Of a kind of layers; files give each kind its own."""
    ropes = part(text, "rope_parameters")
    if not isinstance(ropes.get(kind), dict):
        raise ValueError(f"rope_parameters are {ropes!r}, without those of {kind}")
    return rope({"rope_parameters": ropes[kind]})


def _other_keys(config: AssistantConfig, target: Mapping[str, Any], name: str) -> Iterator[str]:
    """What the target, called `name`, has no keys for, or others."""
    types, shared = target.get("layer_types"), target.get("num_kv_shared_layers") or 0
    owners = types[: len(types) - shared] if isinstance(types, list) else config.layer_types
    windows = dict(zip(config.layer_types, config.layer_windows, strict=True))
    for kind, window in windows.items():
        if kind not in owners:
            yield f"keys of a layer of {kind}, but {name} has none with keys of its own"
            continue
        has = _sizes(target, kind)
        if has != config.heads(kind):
            mine, theirs = (
                f"{heads} heads of {width}" for width, heads in (config.heads(kind), has)
            )
            yield f"keys of {mine} in layers of {kind}, but {name} has {theirs}"
        if window is not None and (its := target.get("sliding_window", 512)) != window:
            yield f"the last {window} keys of {kind}, but {name} keeps {its}"


def _sizes(target: Mapping[str, Any], kind: str) -> tuple[Any, Any]:
    """The width and the number of heads of keys in a target's layers of this kind."""
    heads = target.get("num_key_value_heads", 1)
    if kind == SLIDING:
        return target.get("head_dim", 256), heads
    own = target.get("num_global_key_value_heads") if target.get("attention_k_eq_v") else None
    return target.get("global_head_dim", 512), heads if own is None else own


def _of_full_layers(text: Fields, types: tuple[Any, ...]) -> Fields:
    """`text` with the sizes of full attention beside the others, where the file lists layers."""
    listed = part(text, _BY_LAYER)
    full = {str(i) for i, kind in enumerate(types) if kind == FULL}
    sizes = dict(next(iter(listed.values()), {}))
    alike = all(own == sizes for own in listed.values())
    if not alike or not listed.keys() <= full or not sizes.keys() <= _OF_FULL.keys():
        what = f"{_BY_LAYER} is {listed!r}, not the same sizes for layers of full attention alone"
        raise ValueError(what)
    return {**text, **{_OF_FULL[name]: size for name, size in sizes.items()}}
