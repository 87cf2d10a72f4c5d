"""A target whose passes differ by width, and answers from it."""

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.observer import Observer
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.decode import prefill
from dflash_mlx.engine.state import State
from dflash_mlx.target.model import Target
from support.decoding import rounds as decode
from support.families import VOCAB_SIZE, make_model
from support.toys import Scripted, random_tree

TOKENS = 48


LOOSE = DecodeConfig("dflash", max_tokens=TOKENS)


EXACT = DecodeConfig("dflash", max_tokens=TOKENS, exact=True)


FAMILIES = {"llama": 0.003, "llama_sliding": 0.003, "gemma3_text": 0.01}  # size of the rounding


class Rounding(Target):
    """A target whose passes over several rows embed every token a little differently.

    As with other orders of summation, logits, keys and values all differ from a one-row pass's.
    """

    def __init__(self, family: str, size: float, seed: int = 0) -> None:
        super().__init__(make_model(family, seed), 400, family)
        table = self.embedding()
        self._exact = table.weight
        noise = mx.random.normal(table.weight.shape, key=mx.random.key(9))
        self._rough = table.weight * (1 + size * noise)
        self.rows: list[int] = []
        self.plain: dict[int, list[int]] = {}

    def forward(self, tokens, cache, block, taps=()):
        self.rows.append(block.rows)
        self.embedding().weight = self._exact if block.rows == 1 else self._rough
        return super().forward(tokens, cache, block, taps)


def prompt_of(seed, length=20):
    return np.random.default_rng(seed).integers(VOCAB_SIZE, size=length).tolist()


def foretold(prompt, plain, seed=0, width=6):
    """Trees with a run of the plain answer, of random length, and wrong branches beside it."""
    rng = np.random.default_rng(seed)

    def script(tokens, room):
        ahead = plain[len(tokens) - len(prompt) :][: int(rng.integers(1, 7))][: room - 1]
        others, parents = random_tree(rng, min(width, room - 1 - len(ahead)), VOCAB_SIZE)
        if ahead and ahead[0] in others:
            others, parents = [], []
        below = [p + len(ahead) if p else 0 for p in parents]
        return [*ahead, *others], [*range(len(ahead)), *below]

    return Scripted(script)


def start(target, drafter, prompt):
    state = State(target.new_cache(), drafter.new_context())
    prefill(target, drafter, state, prompt, LOOSE, Observer())
    return state


def answer(target, drafter, state, config):
    statistics = Statistics(drafter.name)
    tokens = []
    for accepted in decode(target, drafter, state, config, Observer()):
        statistics.add_round(accepted)
        tokens += accepted.tokens
    return tokens, statistics


def plain_answer(target, seed):
    """To the prompt of that seed; computed once."""
    if seed not in target.plain:
        state = start(target, NoDraft(), prompt_of(seed))
        target.plain[seed] = answer(target, NoDraft(), state, LOOSE)[0]
    return target.plain[seed]


def drafted_answer(target, seed, config):
    drafter = foretold(prompt_of(seed), plain_answer(target, seed), seed)
    return answer(target, drafter, start(target, drafter, prompt_of(seed)), config)
