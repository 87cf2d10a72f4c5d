"""A target from its files: what is known of it before, and its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.config import PairConfig
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.models.check import ModelFacts, check_target, describe_target, loading
from dflash_mlx.models.names import SHIPPED, Names, find_source, gguf_file
from dflash_mlx.system.cpu_math import applies as on_cpu
from dflash_mlx.verifier.model import Target

EMBEDDED_DRAFTER = "smollm2-135m-dflash"  # its config says what the embedded target is


def target_facts(names: Names, update: bool = True) -> ModelFacts:
    """What a target is, as far as that can be had without its weights.

    Of the embedded one these are a few numbers. update: as of `find_source`. Raises DFlashError
    where there is no such target.
    """
    if names.model is not None and (file := gguf_file(names.model)) is not None:
        from dflash_mlx.models.formats.gguf_target import read_config as read_gguf  # takes seconds

        return describe_target(read_gguf(file), names.shown, file)
    if names.model is not None:
        return check_target(find_source(names.model, update=update), names.shown)
    drafter = FILES.read_config(SHIPPED / EMBEDDED_DRAFTER)
    config = {
        "hidden_size": drafter.hidden_size,
        "vocab_size": drafter.vocab_size,
        "num_hidden_layers": drafter.num_target_layers,
    }
    return describe_target(config, names.shown)


class TargetReader:
    """How a target is read: here whole, elsewhere a part of it."""

    parts = 1  # processes that share it

    def check(self, facts: ModelFacts) -> None:
        """DFlashError for a target that cannot be read so; no weight is read."""

    def read(self, facts: ModelFacts, config: PairConfig) -> tuple[Target, Any]:
        """The target and its tokenizer. facts: fetched."""
        return read_target(facts)


WHOLE = TargetReader()


def read_target(
    facts: ModelFacts,
    share: Callable[[nn.Module], None] | None = None,
    make: Callable[[Any, int, str], Target] = Target,
) -> tuple[Target, Any]:
    """The target and its tokenizer; on a CPU its weights become float32, the fast path there.

    share: leaves of a model the part that this process computes, before weights are read. make:
    the target, of model, context length and name. DFlashError for what mlx-lm cannot load.
    """
    if facts.source is None:
        from dflash_mlx.models.default_model import fetch
        from dflash_mlx.models.formats.gguf_target import load_gguf

        file = facts.file or fetch()
        model, tokenizer, config = load_gguf(file, on_cpu(), share)
        return make(model, config["max_position_embeddings"], facts.name), tokenizer
    from mlx_lm.utils import dequantize_model, load_model, load_tokenizer  # takes seconds

    folder, no_code = facts.source.here, {"trust_remote_code": False}
    with loading(facts.name):
        model, config = load_model(folder, lazy=share is not None)
        tokenizer = load_tokenizer(folder, no_code, eos_token_ids=config.get("eos_token_id"))
        if share is None:
            mx.eval(model(mx.array([[0]])))  # here, where it can be said, not in the first answer
    if on_cpu():
        model.set_dtype(mx.float32)  # before, so that no product of scales is rounded
        model = dequantize_model(model)
        model.set_dtype(mx.float32)  # of formats whose scales are no floats
    if share is not None:
        share(model)
    with loading(facts.name) if share is not None else nullcontext():  # parts are read only now
        mx.eval(model.parameters())
    return make(model, facts.context_length, facts.name), tokenizer
