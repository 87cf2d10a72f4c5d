"""Tiny random models of mlx-vlm's, a processor and a tokenizer for them, and pictures."""

from __future__ import annotations

import hashlib
import importlib
import io
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer
from PIL import Image

from dflash_mlx.core.prompt import Prompt
from dflash_mlx.engine.pair import Pair
from dflash_mlx.verifier.pass_times import PassTimes
from dflash_mlx.vision.pictures import Picture
from dflash_mlx.vision.prompts import read_prompt
from dflash_mlx.vision.target import SeeingTarget
from support.pairs import full_pair

VOCABULARY = 128  # a token is a character's number
IMAGE, START, END, USER, ASSISTANT = range(1, 6)
PATCH, SIDE = 4, 8  # pixels of a patch, of a placeholder's square of patches

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": PATCH,
    "image_size": 8 * PATCH,
}
_QWEN_TOWER = {
    **{name: value for name, value in _TOWER.items() if "num" not in name},
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_TURNED = {"type": "default", "mrope_section": [2, 1, 1]}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 0,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "eos_token_id": [0],
}
_NETS = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        **_TURNED, "rope_theta": 10000.0, "partial_rotary_factor": 0.5
    },
}  # fmt: skip
_IDEFICS = {
    "text_config": {**_TEXT, "num_hidden_layers": 3},
    "vision_config": {**_TOWER, "image_size": 4 * PATCH},
    "image_token_id": IMAGE,
    "scale_factor": 2,
    "vocab_size": VOCABULARY,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {**_TEXT, **_NETS},
        "vision_config": _QWEN_TOWER,
        **_QWEN_IDS,
    },
    "qwen3_5_moe": {
        "text_config": {
            **_TEXT,
            **_NETS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "vision_config": _QWEN_TOWER,
        **_QWEN_IDS,
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 3,
            "rope_scaling": {**_TURNED, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_IDS,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 6,
            "global_head_dim": 16,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": {
            **_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "default_output_length": 16,
        },
        "image_token_id": IMAGE,
        "audio_token_id": 0,
        "vocab_size": VOCABULARY,
    },
    "muse_glimmer": {
        "text_config": {**_TEXT, "num_hidden_layers": 4, "sliding_window": 24},
        "vision_config": {**_TOWER, "pos_emb_height": 8, "pos_emb_width": 8},
        "image_token_id": IMAGE,
        "video_token_id": 0,
        "out_hidden_size": 64,
        "projector_hidden_size": 24,
    },
    "smolvlm": {
        **_IDEFICS,
        "vision_config": {**_IDEFICS["vision_config"], "model_type": "siglip_vision_model"},
    },
    "idefics3": {
        **_IDEFICS,
        "text_config": {**_IDEFICS["text_config"], "model_type": "llama"},
        "vision_config": {**_IDEFICS["vision_config"], "model_type": "idefics3"},
    },
    "lfm2_vl": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_dim": 64,
            "block_ff_dim": 48,
            "block_multiple_of": 8,
            "conv_dim": 64,
        },
        "vision_config": {**_TOWER, "num_patches": 64},
        "image_token_id": IMAGE,
        "projector_hidden_size": 24,
    },
    "glm4v": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 3,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_QWEN_TOWER, "out_hidden_size": 64},
        **_QWEN_IDS,
        "image_token_index": IMAGE,
        "video_token_index": 0,
    },
}
FAMILIES["gemma4_large"] = {
    **FAMILIES["gemma4"],
    "text_config": {
        **FAMILIES["gemma4"]["text_config"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "sliding_window": 24,
    },
}
TURNING = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "glm4v")  # positions in three dimensions


def make_whole(family: str, seed: int = 0) -> Any:
    """A model with random weights, all of which have a part in what it says."""
    kind = family.removesuffix("_large")
    module = importlib.import_module(f"mlx_vlm.models.{kind}")
    raw = {"model_type": kind, **FAMILIES[family]}
    raw = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    for part in ("text_config", "vision_config"):
        raw[part].setdefault("model_type", kind)
    config = module.ModelConfig.from_dict(raw)
    for part, kind in (("text_config", "TextConfig"), ("vision_config", "VisionConfig")):
        if isinstance(getattr(config, part), dict):
            setattr(config, part, getattr(module, kind).from_dict(raw[part]))
    mx.random.seed(seed)
    whole = module.Model(config)

    def drawn(name: str, array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape)
        return array + 0.2 * noise if "norm" in name else 0.15 * noise

    whole.update(tree_map_with_path(drawn, whole.parameters()))
    whole.eval()
    return whole


class Characters:
    """A tokenizer with a token for each character, and a chat template."""

    has_chat_template = True
    pad_token = eos_token = "\0"

    def __init__(self) -> None:
        self.eos_token_ids = {0}

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % VOCABULARY for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    @property
    def detokenizer(self) -> NaiveStreamingDetokenizer:
        return NaiveStreamingDetokenizer(self)

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = True, tokenize: bool = True
    ) -> Any:
        text = ""
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            text += chr(USER if message["role"] == "user" else ASSISTANT)
            for part in parts:
                is_image = part["type"] == "image"
                text += f"{chr(START)}{chr(IMAGE)}{chr(END)}" if is_image else part["text"]
        text += chr(ASSISTANT) if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


class Processor:
    """Cuts pictures into what one family's tower takes."""

    def __init__(self, family: str) -> None:
        self.tokenizer = Characters()
        self.image_processor = SimpleNamespace(to_dict=lambda: {"patch": PATCH})
        self._cut: Callable[[list[np.ndarray]], dict[str, Any]] = {
            "gemma4": _whole, "gemma4_large": _whole,
            "smolvlm": _tiles, "idefics3": _tiles, "lfm2_vl": _packed,
        }.get(family, _patches)  # fmt: skip

    def __call__(self, text: str, images: Sequence[Any], **_: Any) -> dict[str, Any]:
        shown = [np.asarray(image, np.float32) / 128 - 1 for image in images]
        if self._cut is _tiles:
            shown = [part for image in shown for part in _squares(image)]
        counts = [image.shape[0] * image.shape[1] // SIDE**2 for image in images_of(images)]
        tokens: list[int] = []
        left = iter(counts)
        for token in self.tokenizer.encode(text):
            tokens += [token] * next(left) if token == IMAGE else [token]
        assert next(left, None) is None, "a picture has no place"
        ids = np.array([tokens])
        kinds = (ids == IMAGE).astype(np.int32)
        more = {"mm_token_type_ids": kinds} if self._cut is _whole else {}
        mask = np.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, **more, **self._cut(shown)}


def images_of(images: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(image) for image in images]


def _patches(images: list[np.ndarray]) -> dict[str, Any]:
    """As Qwen's: patches in the order of squares of 2 x 2 of them, each frame twice."""
    grids, rows = [], []
    for image in images:
        h, w = image.shape[0] // PATCH, image.shape[1] // PATCH
        grids.append([1, h, w])
        cut = image.reshape(h // 2, 2, PATCH, w // 2, 2, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        twice = np.repeat(cut.reshape(h * w, 3, 1, PATCH, PATCH), 2, axis=2)
        rows.append(twice.reshape(h * w, -1))
    return {"pixel_values": np.concatenate(rows), "image_grid_thw": np.array(grids)}


def _whole(images: list[np.ndarray]) -> dict[str, Any]:
    return {"pixel_values": [image.transpose(2, 0, 1) for image in images]}


def _squares(image: np.ndarray) -> list[np.ndarray]:
    side = 4 * PATCH
    return [
        image[y : y + side, x : x + side]
        for y in range(0, image.shape[0], side)
        for x in range(0, image.shape[1], side)
    ]


def _tiles(images: list[np.ndarray]) -> dict[str, Any]:
    return {"pixel_values": np.stack([image.transpose(2, 0, 1) for image in images])[None]}


def _packed(images: list[np.ndarray]) -> dict[str, Any]:
    shapes = [(image.shape[0] // PATCH, image.shape[1] // PATCH) for image in images]
    most = max(h * w for h, w in shapes)
    pixels = np.zeros((len(images), most, 3 * PATCH**2), np.float32)
    mask = np.zeros((len(images), most), np.int32)
    for i, (image, (h, w)) in enumerate(zip(images, shapes, strict=True)):
        cut = image.reshape(h, PATCH, w, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(h * w, -1)
        pixels[i, : h * w], mask[i, : h * w] = cut, 1
    return {
        "pixel_values": pixels,
        "spatial_shapes": np.array(shapes),
        "pixel_attention_mask": mask,
    }


@lru_cache
def picture(seed: int, width: int = 2, height: int = 2) -> Picture:
    """A picture of noise; width, height: in squares of 16 pixels."""
    shape = (16 * height, 16 * width, 3)
    pixels = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    digest = hashlib.sha256(str(shape).encode() + pixels.tobytes()).hexdigest()
    return Picture(file.getvalue(), shape[1], shape[0], digest)


@lru_cache
def make_target(family: str) -> SeeingTarget:
    target = SeeingTarget(make_whole(family), 1000, family)
    target.eyes.processor = Processor(family)
    return target


def message(*parts: str | Picture, role: str = "user") -> dict[str, Any]:
    shown = [
        {"type": "text", "text": part} if isinstance(part, str) else
        {"type": "image", "picture": part}
        for part in parts
    ]  # fmt: skip
    return {"role": role, "content": shown}


def conversation(pictures: int) -> list[dict[str, Any]]:
    """Of two turns, with so many pictures, of other shapes, at several places."""
    some = [picture(1, 2, 2), picture(2, 1, 2), picture(3, 3, 1)][:pictures]
    first = message("What is it? ", *some[:2], " Say.")
    return [first, message("It is.", role="assistant"), message("And", *some[2:], " this?")]


def ask(target: SeeingTarget, messages: Sequence[Any]) -> Prompt:
    if not pictures_in(messages):
        return Prompt(tuple(Characters().apply_chat_template(messages)))
    return read_prompt(target, Characters(), messages)


def pictures_in(messages: Sequence[Any]) -> list[Picture]:
    parts = [part for m in messages for part in m["content"]]
    return [part["picture"] for part in parts if part["type"] == "image"]


class Reference:
    """mlx-vlm's own passes, with its caches and its positions."""

    def __init__(self, target: SeeingTarget, messages: Sequence[Any]) -> None:
        self.whole, self.eyes = target.eyes.whole, target.eyes
        pictures = pictures_in(messages)
        text = Characters().apply_chat_template(messages, tokenize=False)
        self.inputs = self.eyes.process(text, pictures) if pictures else {
            "input_ids": mx.array([Characters().encode(text)])
        }  # fmt: skip

    def logits(self, behind: Sequence[int] = (), cache: Any = None) -> mx.array:
        """[V] after the prompt and the tokens `behind` it, in one fresh pass."""
        from mlx_vlm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.whole.language_model) if cache is None else cache
        self.whole.language_model._rope_deltas = self.whole.language_model._position_ids = None
        ids = mx.concatenate([self.inputs["input_ids"], mx.array([[*behind]], mx.int32)], axis=1)
        beside = {k: v for k, v in self.inputs.items() if k not in ("input_ids", "attention_mask")}
        pixels = beside.pop("pixel_values", None)
        if "mm_token_type_ids" in beside:
            beside["mm_token_type_ids"] = (ids == IMAGE).astype(mx.int32)
        return self.whole(ids, pixels, mask=None, cache=cache, **beside).logits[0, -1]

    def greedy(self, length: int) -> list[int]:
        """An answer, a token a pass, with what the model itself remembers of positions."""
        from mlx_vlm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self.whole.language_model)
        tokens = [int(mx.argmax(self.logits(cache=cache)))]
        while len(tokens) < length:
            row = self.whole.language_model(mx.array([tokens[-1:]]), cache=cache)
            tokens.append(int(mx.argmax(row.logits[0, -1])))
        return tokens


def seeing_pair(family: str, folder: Path) -> Pair:
    """A target that sees, with drafters of all kinds, whose files go to `folder`."""
    target = make_target(family)
    target.pass_times = PassTimes((1, 96), (1.0, 3.0))
    return full_pair(folder, target, Characters())


def some_prompt(target: SeeingTarget) -> Callable[[np.random.Generator], Prompt]:
    """Conversations of one to three turns about three pictures, many of which begin alike."""

    def prompt(rng: np.random.Generator) -> Prompt:
        messages = []
        for turn in range(int(rng.integers(1, 4))):
            words = "abcab"[: int(rng.integers(1, 6))]
            shown = [picture(int(rng.integers(3)), 1 + turn % 2) for _ in range(rng.integers(3))]
            messages.append(message(f"{turn}: ", *shown, words))
            messages.append(message("Yes, a. " * int(rng.integers(1, 3)), role="assistant"))
        return ask(target, messages[:-1])

    return prompt
