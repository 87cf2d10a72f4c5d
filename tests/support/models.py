"""Tiny random targets and drafters as folders on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.families import FAMILIES, make_model
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder

Damage = Callable[[Path], Any]

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]

# One token per character; with the special tokens as many as the tiny models have, 97.
CHARACTERS = ["Ċ", "Ġ", *(chr(code) for code in range(0x21, 0x7F) if chr(code) not in "`~")]
EOS = 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """A byte-level tokenizer without merges: every printable ASCII character is a token."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    model: nn.Module | None = None,
    template: str | None = TEMPLATE,
    **changes: Any,
) -> Path:
    """A tiny llama as a Hugging Face folder; `changes` replaces fields of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**FAMILIES["llama"], "eos_token_id": EOS, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten((model or make_model("llama")).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_tokenizer(folder, template)
    return folder


def write_drafter(folder: Path, **changes: Any) -> Path:
    """A random drafter that fits the tiny llama unless `changes` says otherwise."""
    config = tiny_drafter_config(**changes)
    return write_drafter_folder(folder, config, random_drafter(config))


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    file = folder / name
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def overwrite(name: str, contents: str) -> Damage:
    return lambda folder: (folder / name).write_text(contents)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_a_tensor(folder: Path) -> None:
    weights = dict(tree_flatten(make_model("llama").parameters()))
    del weights["model.layers.1.mlp.up_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def ask_for_code_in_the_tokenizer(folder: Path) -> None:
    (folder / "tokenization.py").write_text("open('ran', 'w').close()")
    (folder / "tokenizer.json").unlink()
    asked = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(asked))


# What is seen from the configuration and the heads alone is in models/test_check.py.
def ask_for_code(folder: Path) -> None:
    (folder / "model.py").write_text("open('ran', 'w').close()")
    edit_config(folder, model_file="model.py")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no hidden size": (lambda folder: edit_config(folder, hidden_size=None), "cannot be loaded"),
    "another shape": (lambda folder: edit_config(folder, intermediate_size=128), "shape"),
    "damaged weights": (overwrite("model.safetensors", "no weights"), "is damaged"),
    "truncated weights": (truncate, "is truncated"),
    "a missing tensor": (drop_a_tensor, "layers.1.mlp.up_proj.weight"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "cannot be loaded"),
    "a damaged tokenizer": (overwrite("tokenizer.json", "{"), "cannot be loaded"),
    "code of its own": (ask_for_code, "its own Python file 'model.py'"),
    "a tokenizer with code of its own": (ask_for_code_in_the_tokenizer, "cannot be loaded"),
}


def write_endless_model(folder: Path) -> Path:
    """A tiny llama whose answers go on for as long as one likes: no token ends them."""
    model = write_model(folder, max_position_embeddings=100_000, eos_token_id=999)
    edit_config(model, "tokenizer_config.json", eos_token=None)
    return model
