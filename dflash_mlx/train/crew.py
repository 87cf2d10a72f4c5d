"""Several processes that train one network, each on its part of every step's sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from dflash_mlx.train.blocks import Blocks

if TYPE_CHECKING:
    from dflash_mlx.ranks.group import Ranks


@dataclass(frozen=True)
class Crew:
    """All of them, seen from one. ranks: None for a process that is alone."""

    ranks: Ranks | None = None

    @property
    def group(self) -> Any:
        """MLX's, None for a process that is alone."""
        return None if self.ranks is None else self.ranks.group

    @property
    def size(self) -> int:
        """How many."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def rank(self) -> int:
        """Which of them this is; the first one measures and writes."""
        return 0 if self.ranks is None else self.ranks.rank

    def check(self, own: Mapping[str, Any]) -> None:
        """End all of them where one would train something else."""
        if self.ranks is not None:
            self.ranks.check_alike(own)

    def own(self, blocks: Blocks) -> Blocks:
        """This process's sequences of all of a step's."""
        if self.group is None:
            return blocks
        each = len(blocks.rows) // self.size
        part = slice(self.rank * each, (self.rank + 1) * each)
        values = {f.name: getattr(blocks, f.name) for f in fields(blocks)}
        own: dict[str, Any] = {k: v if v is None else v[part] for k, v in values.items()}
        return replace(blocks, **own)

    def mean(self, number: mx.array) -> mx.array:
        """The mean of [] over all; no gradient flows through it."""
        if self.group is None:
            return number
        return mx.stop_gradient(mx.distributed.all_sum(number, group=self.group)) / self.size

    def average(self, tree: Any) -> Any:
        """The mean of every array over all."""
        return tree if self.group is None else nn.average_gradients(tree, self.group)

    def seconds(self, own: float) -> float:
        """The first one's, so that all end at one step."""
        return own if self.group is None else float(self.first(mx.array(own)))

    def first(self, tree: Any) -> Any:
        """The first one's arrays."""
        if self.group is None:
            return tree

        def of_first(array: mx.array) -> mx.array:
            own = array if self.rank == 0 else mx.zeros_like(array)
            whole = mx.distributed.all_sum(own, group=self.group)
            mx.eval(whole)  # one by one, so that all do it in one order
            return whole

        return tree_map(of_first, tree)
