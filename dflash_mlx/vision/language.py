"""mlx-vlm's language models, called as mlx-lm's are, with caches that the verifier knows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Language(nn.Module):
    """The language model of `whole`, a model of mlx-vlm's."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.language_model = whole.language_model
        self._beside: dict[str, Any] = {}

    def give(self, beside: dict[str, Any]) -> None:
        """What the next pass is given beside tokens and caches, such as positions."""
        self._beside = beside

    def __call__(
        self, tokens: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        beside, self._beside = self._beside, {}
        if input_embeddings is not None:
            beside["inputs_embeds"] = input_embeddings
        return self.language_model(tokens, cache=cache, **beside).logits  # type: ignore[no-any-return]

    @property
    def layers(self) -> list[nn.Module]:
        inner = self.language_model.get("model", self.language_model)
        return inner.layers  # type: ignore[no-any-return]

    @property
    def args(self) -> Any:
        """What is in no weight."""
        inner = self.language_model
        return getattr(inner, "args", None) or getattr(inner, "config", None)

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import KVCache

        make = getattr(self.language_model, "make_cache", None)
        return [*map(_known, make() if make else [KVCache() for _ in self.layers])]


def _known(cache: Any) -> Any:
    """mlx-lm's cache of the same kind; one of a kind that the verifier will refuse, as it is."""
    from mlx_lm.models import cache as known

    from dflash_mlx.verifier.recurrent import States

    kind = type(cache).__name__
    if kind == "KVCache":
        return known.KVCache()
    if kind == "RotatingKVCache":
        return known.RotatingKVCache(cache.max_size, cache.keep)
    if kind == "ArraysCache":
        return States(len(cache.cache))
    return known.CacheList(*map(_known, cache.caches)) if kind == "CacheList" else cache
