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
from unittest.mock import patch

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
from support.seeing_families import (
    ASSISTANT,
    END,
    FAMILIES,
    IMAGE,
    PATCH,
    SIDE,
    START,
    USER,
    VOCABULARY,
)


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
            "gemma3": _equal, "gemma4": _whole, "gemma4_large": _whole,
            "smolvlm": _tiles, "idefics3": _tiles, "lfm2_vl": _packed,
        }.get(family, _patches)  # fmt: skip

    def __call__(self, text: str, images: Sequence[Any], **_: Any) -> dict[str, Any]:
        images = [image.resize((32, 32)) for image in images] if self._cut is _equal else images
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


def _equal(images: list[np.ndarray]) -> dict[str, Any]:
    return {"pixel_values": np.stack([image.transpose(2, 0, 1) for image in images])}


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
        if self.eyes.mutual:
            return self._of_gemma(ids, pixels, cache)
        return self.whole(ids, pixels, mask=None, cache=cache, **beside).logits[0, -1]

    def _of_gemma(self, ids: mx.array, pixels: Any, cache: Any) -> mx.array:
        """With the masks of transformers, which mlx-vlm's own passes do not have."""
        is_image, kind = np.array(ids[0] == IMAGE), self.whole.config.model_type
        starts = np.cumsum(is_image & ~np.roll(is_image, 1))
        same = mx.array((starts[:, None] == starts) & is_image & is_image[:, None])
        distance = mx.arange(len(is_image))[:, None] - mx.arange(len(is_image))
        seen = self.whole.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids))

        def mask(*_: Any, window_size: int | None = None, **__: Any) -> mx.array:
            mutual = same if window_size or kind == "gemma3" else mx.zeros_like(same)
            return ((distance >= 0) | mutual) & (distance < (window_size or len(is_image)))

        with patch(f"mlx_vlm.models.{kind}.language.create_attention_mask", mask):
            found = self.whole.language_model(ids, inputs_embeds=seen.inputs_embeds, cache=cache)
        return found.logits[0, -1]

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
