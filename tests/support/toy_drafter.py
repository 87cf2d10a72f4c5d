"""A drafter for toy targets whose law can be enumerated."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.dflash.context import FeatureContext
from dflash_mlx.drafters.growth.rank import rank
from dflash_mlx.drafters.none import NoContext
from support.law import VOCABULARY


class ToyContext(NoContext, FeatureContext):
    """Remembers nothing."""

    def __init__(self) -> None:
        pass


class ToyDrafter:
    """Stands for a drafter network: logits depend on the anchor, the prefix and the position."""

    kernels = selector = None
    family = "dflash"
    taps: tuple[int, ...] = ()

    def __init__(self, seed: int, block_size: int = 4) -> None:
        shape = (VOCABULARY, block_size, VOCABULARY)
        self.table = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 1.5
        self.block_size = block_size
        self.config = SimpleNamespace(
            block_size=block_size,
            target_layer_ids=(),
            vocab_size=VOCABULARY,
            selector=self.selector,
        )

    def new_context(self) -> ToyContext:
        return ToyContext()

    def ranked(self, context, anchor, rows, k, prefixes=((),)):
        return rank(self.logits(context, anchor, rows, prefixes), k)

    def logits(self, context, anchor, rows, prefixes=((),)):
        found = []
        for prefix in prefixes:
            seen = [*anchor.tolist(), *prefix]
            found += [self.table[seen[-1], k] for k in range(len(prefix), rows - 1)]
        return mx.array(np.stack(found))
