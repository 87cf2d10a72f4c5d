"""From a folder to a target's model and tokenizer; its config is checked before its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.compatibility import TargetFacts, check_target, describe_target
from dflash_mlx.drafters.checkpoint import read_config
from dflash_mlx.errors import DFlashError
from dflash_mlx.findings import in_one_line
from dflash_mlx.resolve import SHIPPED, Names, resolve_folder
from dflash_mlx.target import Target

EMBEDDED_DRAFTER = "smollm2-135m-dflash"  # its config says what the embedded target is


@dataclass(frozen=True)
class TargetFiles:
    """A target before its weights are read.

    name: what it is called. folder: None for the embedded one, which is fetched by `load`.
    facts: what checking it found.
    """

    name: str
    folder: Path | None
    facts: TargetFacts

    def load(self) -> tuple[Target, Any]:
        """The target and its tokenizer; DFlashError for what cannot be read."""
        if self.folder is None:
            model, tokenizer, context_length = _load_default()
        else:
            self.facts.raise_first()
            context_length = self.facts.context_length
            model, tokenizer = _load_model(self.folder, self.name)
        return Target(model, context_length, self.name), tokenizer


def find_target(names: Names) -> TargetFiles:
    """The files of a target, downloaded if need be; the embedded one's are only described.

    Raises DFlashError where there are none, or no usable config.json.
    """
    if names.model is None:
        shipped = read_config(SHIPPED / EMBEDDED_DRAFTER)
        config = {
            "hidden_size": shipped.hidden_size,
            "vocab_size": shipped.vocab_size,
            "num_hidden_layers": shipped.num_target_layers,
        }
        return TargetFiles(names.shown, None, describe_target(config, names.shown))
    folder = resolve_folder(names.model, "model")
    facts = check_target(folder, names.shown)
    if not facts.config:
        facts.raise_first()
    return TargetFiles(names.shown, folder, facts)


def _load_default() -> tuple[Any, Any, int]:
    from dflash_mlx.default_model import fetch
    from dflash_mlx.gguf_target import load_gguf

    model, tokenizer, config = load_gguf(fetch(), dequantize=_on_cpu())
    return model, tokenizer, int(config["max_position_embeddings"])


def _load_model(folder: Path, name: str) -> tuple[Any, Any]:
    """Any model that mlx-lm knows; on a CPU its weights become float32, the fast path there."""
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

    try:
        model, loaded = load_model(folder)
        tokenizer = load_tokenizer(
            folder, {"trust_remote_code": False}, eos_token_ids=loaded.get("eos_token_id")
        )
        mx.eval(model(mx.array([[0]])))  # here, where it can be said, and not in the first answer
    except Exception as error:  # of three libraries, one of which raises plain ones
        raise DFlashError(
            f"{name} cannot be loaded ({in_one_line(error)})",
            "choose a complete model folder of a family that mlx-lm supports",
        ) from None
    if _on_cpu():
        model.set_dtype(mx.float32)  # before, so that no product of scales is rounded
        model = dequantize_model(model)
        model.set_dtype(mx.float32)  # of formats whose scales are no floats
        mx.eval(model.parameters())
    return model, tokenizer


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))
