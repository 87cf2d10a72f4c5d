"""mlx-lm models from their folders: targets, and whole models that draft for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core.errors import DFlashError, in_one_line
from dflash_mlx.system.cpu_math import applies as on_cpu

CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
CHOOSE_TARGET = "choose a complete model folder of a family that mlx-lm supports"

Change = Callable[[nn.Module], None]  # of a model whose weights are not read yet


def language_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the language model's part, where it has one, on top."""
    part = raw.get("text_config")
    return {**raw, **part} if isinstance(part, dict) else dict(raw)


def context_length(config: Mapping[str, Any]) -> int:
    """The most tokens that a model takes; 0 where its configuration does not say."""
    lengths = (config.get(key) for key in CONTEXT_LENGTHS)
    return next((length for length in lengths if type(length) is int and length > 0), 0)


@contextmanager
def loading(name: str, next_step: str = CHOOSE_TARGET) -> Iterator[None]:
    """Says of the model `name` what libraries cannot do with it, as a DFlashError."""
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:  # of three libraries, one of which raises plain ones
        raise DFlashError(f"{name} cannot be loaded ({in_one_line(error)})", next_step) from None


def read_model(folder: Path, change: Change | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The model in a folder and its config.json; raises what mlx-lm and MLX raise.

    On a CPU its weights become float32, the fast path there. change: is applied before weights are
    read; without it a token is passed, so that what cannot run fails here.
    """
    from mlx_lm.utils import load_model  # takes seconds

    model, config = load_model(folder, lazy=change is not None)
    if change is None:
        mx.eval(model(mx.array([[0]])))
    model = prepared(model, change)
    mx.eval(model.parameters())
    return model, config


def prepared(model: nn.Module, change: Change | None = None) -> nn.Module:
    """The model as this machine computes fastest, its weights on their way."""
    if on_cpu():
        from mlx_lm.utils import dequantize_model  # takes seconds

        model.set_dtype(mx.float32)  # before, so that no product of scales is rounded
        model = dequantize_model(model)
        model.set_dtype(mx.float32)  # of formats whose scales are no floats
    if change is not None:
        change(model)
    mx.async_eval(model.parameters())
    return model


def family_of(raw: Mapping[str, Any]) -> str:
    """The file of mlx-lm's that has the family of a config.json, "" where there is none."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier():
        return ""
    from mlx_lm.utils import _get_classes  # takes seconds

    try:
        model, _ = _get_classes(dict(raw))
    except (ValueError, AttributeError, TypeError):  # of no such file, or of one without a model
        return ""
    return str(model.__module__).rpartition(".")[2]
