"""Where an answer leaves the plain one, and whether a near-tie explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the plain one.

    margin: how far apart the target's logits of the two tokens are there; None where one answer
    goes on after the other has ended, which no near-tie explains.
    """

    position: int
    margin: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether the order of floating-point sums can explain it."""
        return self.margin is not None and self.margin < 1e-3


def first_difference(
    target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Compare two answers; the margin comes from one fresh pass over the shared tokens."""
    pairs = enumerate(zip(plain, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(other)))
    if at == len(plain) == len(other):
        return None
    if at in (len(plain), len(other)):
        return Difference(at, None)
    tokens = mx.array([*prompt, *plain[:at]])
    logits, _ = target.forward(tokens, target.new_cache(), Block(tokens.shape[0]))
    margin = mx.abs(logits[-1, plain[at]] - logits[-1, other[at]])
    return Difference(at, margin.item())  # type: ignore[arg-type]
