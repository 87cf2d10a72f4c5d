"""Tiny language models that draft for others, and what mlx-lm alone says of what they draft."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.drafters.lm.model import LanguageConfig, LanguageModel
from dflash_mlx.verifier.model import Target
from support.families import make_model

SEED = 5  # of models that draft, other than that of targets


def language_model(
    name: str, target: Any, seed: int = SEED, context: int = 4096, **more: Any
) -> LanguageModel:
    """A tiny model of a family, as it drafts for a target."""
    own = Target(make_model(name, seed, **more), context, name)
    config = LanguageConfig(
        model_type=name, vocab_size=0, context_length=context, quantization=None
    )
    return LanguageModel(own, config, target)


class Alone:
    """The same model as mlx-lm has it, without our hooks or caches."""

    def __init__(self, name: str, seed: int = SEED, **more: Any) -> None:
        self.model = make_model(name, seed, **more)

    def after(self, tokens: list[int]) -> np.ndarray:
        """[V] logits for what follows these tokens, from one pass over all of them."""
        return np.array(self.model(mx.array([tokens]))[0, -1])

    def one_by_one(self, tokens: list[int]) -> np.ndarray:
        """The same from a pass for each of them over mlx-lm's own caches."""
        cache = make_prompt_cache(self.model)
        for token in tokens:
            logits = self.model(mx.array([[token]]), cache=cache)
        return np.array(logits[0, -1])
