"""A short pass after loading, to see whether numbers fit their floating-point type.

Some models have hidden states beyond float16's largest number, 65,504, most of all those that were
trained in bfloat16 and converted. What overflows becomes infinite, then not a number: the target
answers nonsense, or its drafter is never right. Such a model is cast to a type with more range.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.target.block import Block
from dflash_mlx.target.model import Target

MARGIN = 2.0  # other tokens may have larger states than the few that are tried
_TOKENS = 8


class RangeCheck:
    """Widens a target, and then its drafters, where their numbers do not fit.

    configs: of the drafters, whose tapped layers are looked at. notes: a sentence for each model
    that was cast. Raises DFlashError for a target with numbers that no type can hold, and for keys
    and values that cannot be quantised as asked for.
    """

    def __init__(self, target: Target, configs: Sequence[NetworkConfig]) -> None:
        self.notes: list[str] = []
        self._target = target
        taps = tuple(sorted({tap for config in configs for tap in config.target_layer_ids}))
        target.tap(taps)
        if _fit(self._pass(taps)):
            return
        if target.dtype == mx.float16:
            self._widen(target.model, target.name)
        if not _fit(self._pass(taps)):
            raise DFlashError(
                f"{target.name} computes numbers that are infinite or no numbers",
                "download it again, or choose another conversion of it",
            )

    def widened(self, network: Network, config: NetworkConfig) -> Network:
        """The same network, cast if need be. Raises DFlashError where that does not help."""
        if self._drafts(network, config):
            return network
        if network.norm.weight.dtype == mx.float16:
            self._widen(network, "the drafter")
        if not self._drafts(network, config):
            raise DFlashError(
                f"the drafter for {self._target.name} computes numbers that are infinite or no "
                "numbers",
                "choose another one with --drafter, or use --method ngram",
            )
        return network

    def _pass(self, taps: tuple[int, ...]) -> list[mx.array]:
        """Logits and features of tokens from all over the vocabulary.

        Some families give certain tokens -inf whatever the input is; here those have 0.
        """
        target = self._target
        vocabulary = target.forward(mx.zeros(1, mx.int32), target.new_cache(), Block(1))[0].shape[1]
        tokens = mx.arange(_TOKENS) * vocabulary // _TOKENS
        logits, features = target.forward(tokens, target.new_cache(), Block(_TOKENS), taps)
        logits = mx.where((logits == -mx.inf).all(axis=0), 0, logits)
        return [logits] if features is None else [logits, features]

    def _drafts(self, network: Network, config: NetworkConfig) -> bool:
        """Whether a block behind features at the margin has logits that fit."""
        model = BlockModel(network, config, self._target)
        context = model.new_context()
        context.append(mx.zeros(_TOKENS), MARGIN * self._pass(config.target_layer_ids)[1])
        logits = model.logits(context, mx.zeros(1, mx.int32), config.block_size)
        if config.draft_vocab_size is not None:  # tokens that it does not know have -inf
            logits = mx.where(logits == -mx.inf, 0, logits)
        return _fit([logits])

    def _widen(self, model: nn.Module, name: str) -> None:
        dtype = _trained_in(model)
        model.set_dtype(dtype)
        mx.eval(model.parameters())
        words = str(dtype).removeprefix("mlx.core.")
        self.notes.append(f"the numbers of {name} exceed float16, so it computes in {words}")


def _fit(arrays: Sequence[mx.array]) -> bool:
    """Whether all numbers are finite and the largest has some way to go."""
    largest = [mx.abs(a).max() <= mx.finfo(a.dtype).max / MARGIN for a in arrays]
    return all(fits.item() for fits in largest)


def _trained_in(model: nn.Module) -> mx.Dtype:
    """Bfloat16, where a model's float16 weights look like they were that before; else float32."""
    weights: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    floats = (array for _, array in weights if array.dtype == mx.float16)
    exact = (mx.array_equal(a.astype(mx.bfloat16).astype(a.dtype), a) for a in floats)
    return mx.bfloat16 if all(same.item() for same in exact) else mx.float32  # up to the first
