"""The law of a toy target's sampled answers, enumerated, and how far answers are from it.

And drafters for such targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.dflash.block_model import FeatureContext
from dflash_mlx.drafters.growth.grow import Ranked, follow, follow_links, rank
from dflash_mlx.drafters.none import NoContext
from dflash_mlx.drafters.specdiff.model import TextContext
from dflash_mlx.engine.grammar import Constraint
from support import decoding
from support.toys import ToyTarget

PROMPT, LENGTH, VOCABULARY = [0, 1, 2], 4, 4


Allowed = Callable[[tuple[int, ...]], set[int]]  # tokens that may follow an answer; none: it ends


def conditional(
    target: ToyTarget,
    before: list[int],
    config: SamplingConfig,
    allowed: set[int] | None = None,
) -> np.ndarray:
    """The law of the next token in NumPy: mask, bias, penalties, filters, then temperature."""
    logits = target.table[before[-2], before[-1]].astype(float)
    for token, bias in config.logit_bias:
        logits[token] += bias
    if allowed is not None:
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
    if config.repetition_penalty != 1:
        for token in set(before[-config.repetition_context :]):
            factor = config.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    answer = before[len(PROMPT) :]
    for token in set(answer):
        logits[token] -= config.presence_penalty + config.frequency_penalty * answer.count(token)
    ends = [*config.stop_token_ids]
    if len(answer) < config.min_tokens and np.isfinite(np.delete(logits, ends)).any():
        logits[ends] = -np.inf
    p = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-p)
    keep = np.zeros(len(p), dtype=bool)
    keep[order[: np.searchsorted(np.cumsum(p[order]), config.top_p) + 1]] = True
    if 0 < config.top_k < len(p):
        keep[order[config.top_k :]] = False
    keep &= p >= config.min_p * p.max()
    weights = np.where(keep, p ** (1 / config.temperature), 0)
    return weights / weights.sum()


def enumerated_law(
    target: ToyTarget, config: SamplingConfig, allowed: Allowed | None = None
) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in law.items():
            tokens = None if allowed is None else allowed(answer)
            if answer and answer[-1] in config.stop_token_ids:
                tokens = set()
            if tokens == set():
                longer[answer] = chance
                continue
            shares = conditional(target, [*PROMPT, *answer], config, tokens)
            longer |= {(*answer, token): chance * p for token, p in enumerate(shares) if p > 0}
        law = longer
    return law


def law_distance(
    target: ToyTarget,
    drafter_of: Callable[[SamplingConfig], Any],
    draws: int,
    config: DecodeConfig,
) -> float:
    """Of answers with seeds 0, 1, ... from the enumerated law, in standard deviations."""
    answers = answers_of(target, drafter_of, draws, config)
    return chi_square(enumerated_law(target, config.sampling), answers)


def answers_of(
    target: ToyTarget,
    drafter_of: Callable[[SamplingConfig], Any],
    draws: int,
    config: DecodeConfig,
    constraint: Callable[[], Constraint | None] = lambda: None,
) -> list[tuple[int, ...]]:
    """Answers with seeds 0, 1, ..., each under a constraint of its own."""
    answers = []
    for seed in range(draws):
        seeded = replace(config.sampling, seed=seed)
        use = replace(config, max_tokens=LENGTH, sampling=seeded)
        said = decoding.answer(target, drafter_of(seeded), PROMPT, use, constraint())
        answers.append(tuple(said))
    return answers


def chi_square(law: dict[tuple[int, ...], float], answers: list[tuple[int, ...]]) -> float:
    """How many standard deviations chi-square is above its mean (Wilson-Hilferty)."""
    cells = {a: chance for a, chance in law.items() if chance * len(answers) >= 5}
    expected = np.array([*cells.values(), 1 - sum(cells.values())]) * len(answers)
    observed = np.array([answers.count(a) for a in cells], dtype=float)
    observed = np.append(observed, len(answers) - observed.sum())
    if expected[-1] < 1e-9:
        assert observed[-1] == 0
        expected, observed = expected[:-1], observed[:-1]
    degrees = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)


class ToyContext(NoContext, FeatureContext):
    """Remembers nothing."""

    def __init__(self) -> None:
        pass


class ToyDrafter:
    """Stands for a drafter network: logits depend on the anchor, the prefix and the position."""

    kernels = None
    is_linked = False
    family = "dflash"
    aux_layers: tuple[int, ...] = ()

    def __init__(self, seed: int, block_size: int = 4) -> None:
        shape = (VOCABULARY, block_size, VOCABULARY)
        self.table = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 1.5
        self.block_size = block_size
        self.config = SimpleNamespace(
            block_size=block_size,
            target_layer_ids=(),
            vocab_size=VOCABULARY,
        )

    def new_context(self) -> ToyContext:
        return ToyContext()

    def likeliest(self, context, anchor, rows):
        return mx.argmax(self.logits(context, anchor, rows), axis=-1)

    def choices(self, asks, width):
        return [[self._behind(*ask[:3], prefix, width) for prefix in ask.prefixes] for ask in asks]

    def _behind(self, context, anchor, rows, prefix, width):
        if self.is_linked:
            return follow_links(self.linked(context, anchor, rows, [prefix])[0], width)
        return follow(rank(self.logits(context, anchor, rows, [prefix]), width))

    def logits(self, context, anchor, rows, prefixes=((),)):
        found = []
        for prefix in prefixes:
            seen = [*anchor.tolist(), *prefix]
            found += [self.table[seen[-1], k] for k in range(len(prefix), rows - 1)]
        return mx.array(np.stack(found))


class ToyEagle(ToyDrafter):
    """Stands for an EAGLE-3 drafter: logits depend on the token of a row and on its depth."""

    family = "eagle3"

    def begin(self, state):
        return ToyRows(self)


class ToyRows:
    """A draft in the making."""

    in_one_pass = False

    def __init__(self, model: ToyEagle) -> None:
        self.model = model
        self.depths: list[int] = []

    def logits(self, tokens, parents):
        depths = [self.depths[parent] + 1 if parent >= 0 else 0 for parent in parents]
        self.depths += depths
        rows = [
            self.model.table[token, k] for token, k in zip(tokens.tolist(), depths, strict=True)
        ]
        return mx.array(np.stack(rows))

    def likeliest(self, tokens, parents):
        return mx.argmax(self.logits(tokens, parents), axis=-1)

    def ranked(self, tokens, parents, k):
        return rank(self.logits(tokens, parents), k)


class ToyMaskedContext(ToyContext, TextContext):
    """Remembers nothing."""


class ToyMasked:
    """Logits at a place depend on the anchor and on every token of the block that is not masked.

    On later ones too, and strongly, as in a network that looks both ways. calls: how many passes.
    """

    family, mask, aux_layers = "specdiff", VOCABULARY, ()

    def __init__(self, seed: int, block_size: int = 4, strength: float = 1.5) -> None:
        rng, size = np.random.default_rng(seed), block_size
        self.block_size, self.calls = block_size, 0
        self.base = rng.normal(size=(VOCABULARY, size, VOCABULARY)) * 1.5
        self.links = rng.normal(size=(size, size, VOCABULARY, VOCABULARY)) * strength

    def new_context(self) -> ToyMaskedContext:
        return ToyMaskedContext()

    def logits(self, context: Any, block: mx.array, places: Sequence[int]) -> mx.array:
        self.calls += 1
        anchor, *hidden = block.tolist()
        rows = []
        for place in places:
            row = self.base[anchor, place].copy()
            for other, token in enumerate(hidden, start=1):
                if token != self.mask and other != place:
                    row += self.links[other, place, token]
            rows.append(row)
        return mx.array(np.stack(rows).astype(np.float32))

    def ranked(self, context: Any, block: mx.array, places: Sequence[int], k: int) -> Ranked:
        return rank(self.logits(context, block, places), k)
