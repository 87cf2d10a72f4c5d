"""A short pass after loading, to see whether numbers fit their floating-point type.

Some models have hidden states beyond float16's largest number, 65,504, most of all those that were
trained in bfloat16 and converted. What overflows becomes infinite, then not a number: the target
answers nonsense, or its drafter is never right. Such a model is cast to a type with more range.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import DraftModel
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target

MARGIN = 2.0  # other tokens may have larger states than the few that are tried
_TOKENS = 8


def fit_target(target: Target, aux_layers: Collection[int]) -> tuple[str, ...]:
    """Widen a target where its numbers, those of the auxiliary layers among them, do not fit.

    Returns a sentence where it was cast. Raises DFlashError where no type can hold its numbers, and
    for keys and values that cannot be quantised as asked for.
    """
    read = tuple(sorted(set(aux_layers)))
    target.tap(read)
    step = "download it again, or choose another conversion of it"
    return _widened(
        target.model, target.name, lambda: _fit(_pass(target, read)), target.widen, step
    )


def fit_drafter(model: DraftModel, target: Target) -> tuple[str, ...]:
    """As `fit_target`, for a draft model of a target that fits."""
    _, *features = _pass(target, model.aux_layers)
    at_margin = MARGIN * features[0] if features else None

    def fits() -> bool:
        """Whether drafts behind features at the margin have logits that fit."""
        context = model.new_context()
        context.append(mx.zeros(_TOKENS, mx.int32), at_margin)
        return _fit([model.try_out(context)])

    def widen(dtype: mx.Dtype) -> None:
        model.module.set_dtype(dtype, lambda kind: kind == mx.float16)
        mx.eval(model.module.parameters())

    step = "choose another one with --drafter, or use --method ngram"
    return _widened(model.module, f"the drafter for {target.name}", fits, widen, step)


def _widened(
    module: nn.Module,
    name: str,
    fits: Callable[[], bool],
    widen: Callable[[mx.Dtype], None],
    next_step: str,
) -> tuple[str, ...]:
    """What was done so that a module's numbers fit, nothing where they do.

    Only float16 is cast: to what the weights were trained in. Raises DFlashError where that does
    not help.
    """
    if fits():
        return ()
    if (dtype := _trained_in(module)) is not None:
        widen(dtype)
    if dtype is None or not fits():
        raise DFlashError(f"{name} computes numbers that are infinite or no numbers", next_step)
    words = str(dtype).removeprefix("mlx.core.")
    return (f"the numbers of {name} exceed float16, so it computes in {words}",)


def _pass(target: Target, aux_layers: tuple[int, ...]) -> list[mx.array]:
    """Logits and features of tokens from all over the vocabulary.

    Some families give certain tokens -inf whatever the input is; here those have 0.
    """
    vocabulary = target.forward(mx.zeros(1, mx.int32), target.new_cache(), Block(1))[0].shape[1]
    tokens = mx.arange(_TOKENS) * vocabulary // _TOKENS
    logits, features = target.forward(tokens, target.new_cache(), Block(_TOKENS), aux_layers)
    logits = mx.where((logits == -mx.inf).all(axis=0), 0, logits)
    return [logits] if features is None else [logits, features]


def _fit(arrays: Sequence[mx.array]) -> bool:
    """Whether all numbers are finite and the largest has some way to go."""
    largest = [mx.abs(a).max() <= mx.finfo(a.dtype).max / MARGIN for a in arrays]
    return all(fits.item() for fits in largest)


def _trained_in(module: nn.Module) -> mx.Dtype | None:
    """Bfloat16, where float16 weights look like they were that before; else float32.

    None where none is float16.
    """
    weights: list[tuple[str, mx.array]] = tree_flatten(module.parameters())  # type: ignore[assignment]
    floats = [array for _, array in weights if array.dtype == mx.float16]
    if not floats:
        return None
    exact = (mx.array_equal(a.astype(mx.bfloat16).astype(a.dtype), a) for a in floats)
    return mx.bfloat16 if all(same.item() for same in exact) else mx.float32  # up to the first
