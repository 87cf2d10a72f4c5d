"""Folders of tiny models that see."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from support.models import write_tokenizer
from support.seeing import make_whole
from support.seeing_families import FAMILIES, PATCH

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
FIRST = 97  # of their ids
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_folder(folder: Path, family: str = "qwen3_vl") -> Path:
    """A model as it is published, with the processor that mlx-vlm reads for it."""
    folder.mkdir()
    ids = dict(
        zip(("vision_start", "image", "vision_end", "video"), range(FIRST, FIRST + 4), strict=True)
    )
    whole = make_whole(family)
    config = {
        **FAMILIES[family],
        "model_type": family,
        "text_config": asdict(whole.config.text_config),
        "vision_config": asdict(whole.config.vision_config),
        **{f"{name}_token_id": token for name, token in ids.items()},
        "eos_token_id": [1],
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(whole.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {"patch_size": PATCH, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
