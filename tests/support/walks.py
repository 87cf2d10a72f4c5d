"""One sequence of a target, sent through passes, forks and ways back in any order."""

import numpy as np

from support.families import VOCAB_SIZE
from support.hybrids import forward


class Walk:
    """Random passes, forks and ways back of one sequence, beside the tokens it should hold."""

    def __init__(self, target, seed):
        self.target, self.rng = target, np.random.default_rng(seed)
        self.tokens, self.cache = [], target.new_cache()

    def run(self, most=5):
        """A pass; if nobody commits or discards it, as after an interrupt."""
        rows = self.rng.integers(VOCAB_SIZE, size=int(self.rng.integers(1, most + 1))).tolist()
        forward(self.target, self.cache, rows)
        return rows

    def accept(self):
        rows = self.run()
        kept = int(self.rng.integers(len(rows) + 1))
        self.cache.commit(range(kept))
        self.tokens += rows[:kept]

    def discard(self):
        self.run()
        self.cache.discard()

    def prompt(self):
        rows = self.run(12)
        self.cache.commit(range(len(rows)))
        self.tokens += rows
        self.cache.mark(self.cache.length)

    def back(self):
        asked = int(self.rng.integers(len(self.tokens) + 1))
        nearest = self.cache.nearest(asked)
        assert nearest <= asked
        self.cache.rewind(nearest)
        self.tokens = self.tokens[:nearest]

    def fork_amid_a_pass(self):
        """Either copy keeps its own part of the pass; goes on with one of them."""
        rows = self.run()
        caches = [self.cache, self.cache.fork()]
        kept = [int(self.rng.integers(len(rows) + 1)) for _ in caches]
        for cache, part in zip(caches, kept, strict=True):
            cache.commit(range(part))
        other = int(self.rng.integers(2))
        self.cache = caches[other]
        self.run(3)
        self.cache.commit([0])
        self.cache, self.tokens = caches[1 - other], self.tokens + rows[: kept[1 - other]]

    def step(self):
        steps = (self.accept, self.discard, self.run, self.prompt, self.back)
        self.rng.choice([*steps, self.accept, self.fork_amid_a_pass])()
