"""From a folder to a target's model and tokenizer; its config is checked before its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.checkpoint import read_config
from dflash_mlx.errors import DFlashError
from dflash_mlx.resolve import DEFAULT_DRAFTER, DEFAULT_MODEL, SHIPPED, resolve_folder
from dflash_mlx.target import Target

CheckConfig = Callable[[dict[str, Any]], None]
Loaded = tuple[Any, Any, int]  # model, tokenizer, context length

_LOAD_ERRORS = (
    ValueError, KeyError, TypeError, OSError, RuntimeError, AttributeError, ImportError
)  # fmt: skip
_CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def open_target(name: str | None, check: CheckConfig) -> tuple[Target, Any]:
    """A target and its tokenizer, the default ones without a name.

    check: is given config.json with the language model's part on top, before any weight is read;
    it raises where that does not suit.
    """
    loaded = _load_default(check) if name is None else _load_model(name, check)
    model, tokenizer, context_length = loaded
    return Target(model, context_length, name or DEFAULT_MODEL), tokenizer


def _load_default(check: CheckConfig) -> Loaded:
    from dflash_mlx.default_model import fetch
    from dflash_mlx.gguf_target import load_gguf

    shipped = read_config(SHIPPED / DEFAULT_DRAFTER)
    check(
        {
            "hidden_size": shipped.hidden_size,
            "vocab_size": shipped.vocab_size,
            "num_hidden_layers": shipped.num_target_layers,
        }
    )
    model, tokenizer, config = load_gguf(fetch(), dequantize=_on_cpu())
    return model, tokenizer, int(config["max_position_embeddings"])


def _load_model(name: str, check: CheckConfig) -> Loaded:
    """Any model that mlx-lm knows; on a CPU its weights become float32, the fast path there."""
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

    folder = resolve_folder(name, "model")
    config = read_target_config(folder)
    context_length = _context_length(config, folder)
    check(config)
    try:
        model, loaded = load_model(folder)
        tokenizer = load_tokenizer(
            folder, {"trust_remote_code": False}, eos_token_ids=loaded.get("eos_token_id")
        )
    except _LOAD_ERRORS as error:
        raise DFlashError(
            f"{name} cannot be loaded ({error})",
            "choose a complete model folder of a family that mlx-lm supports",
        ) from None
    if _on_cpu():
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, tokenizer, context_length


def read_target_config(folder: Path) -> dict[str, Any]:
    """config.json with the language model's part on top."""
    next_step = "choose a complete model folder in Hugging Face format"
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = {**raw, **raw.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DFlashError(f"{folder} has no readable config.json ({error})", next_step) from None
    if "model_file" in config:
        raise DFlashError(
            f"{folder} asks to run its own Python file {config['model_file']!r}",
            "choose a model of a family that mlx-lm supports itself",
        )
    return config


def _context_length(config: dict[str, Any], folder: Path) -> int:
    for key in _CONTEXT_LENGTHS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    raise DFlashError(
        f"{folder}/config.json has no max_position_embeddings",
        f"add {_CONTEXT_LENGTHS[0]} to it, or choose another model",
    )


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))
