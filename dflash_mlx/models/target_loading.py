"""From a folder to a target's model and tokenizer; its config is checked before its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.findings import in_one_line
from dflash_mlx.drafters.dflash.checkpoint import read_config
from dflash_mlx.models.compatibility import LocalFolder, TargetFacts, check_target, describe_target
from dflash_mlx.models.resolve import SHIPPED, Names
from dflash_mlx.models.sources import MODEL, fetched, find_source
from dflash_mlx.target.model import Target

EMBEDDED_DRAFTER = "smollm2-135m-dflash"  # its config says what the embedded target is


@dataclass(frozen=True)
class TargetFiles:
    """A target before its weights are read.

    name: what it is called. facts: what checking it found, here or on the hub. is_embedded:
    whether it is the one that this package describes itself.
    """

    name: str
    facts: TargetFacts
    is_embedded: bool = False

    def load(self) -> tuple[Target, Any]:
        """The target and its tokenizer, downloaded if need be; DFlashError for what is unusable."""
        self.facts.raise_first()
        if self.is_embedded:
            model, tokenizer, context_length = _load_default()
        else:
            folder = fetched(self.facts.source, MODEL)
            if not isinstance(self.facts.source, LocalFolder):
                check_target(folder, self.name).raise_first()
            context_length = self.facts.context_length
            model, tokenizer = _load_model(folder, self.name)
        return Target(model, context_length, self.name), tokenizer


def find_target(names: Names) -> TargetFiles:
    """A target before its weights are fetched, as far as the hub lets it be checked there.

    The embedded one is only described. Raises DFlashError without files or a usable config.json.
    """
    if names.model is None:
        shipped = read_config(SHIPPED / EMBEDDED_DRAFTER)
        config = {
            "hidden_size": shipped.hidden_size,
            "vocab_size": shipped.vocab_size,
            "num_hidden_layers": shipped.num_target_layers,
        }
        return TargetFiles(names.shown, describe_target(config, names.shown), is_embedded=True)
    facts = check_target(find_source(names.model, MODEL), names.shown)
    if not facts.config:
        facts.raise_first()
    return TargetFiles(names.shown, facts)


def _load_default() -> tuple[Any, Any, int]:
    from dflash_mlx.models.default_model import fetch
    from dflash_mlx.models.formats.gguf_target import load_gguf

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
