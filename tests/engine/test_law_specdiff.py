"""Sampled answers follow the target's law with every schedule of SpecDiff, matched or rejected."""

from __future__ import annotations

from functools import cache, partial

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.sampling import tempered
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.growth.grow import TOP_K
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.drafters.paper import IN_ORDER, SCHEDULES, sampled
from dflash_mlx.drafters.paper import Scheduled as Denoising
from dflash_mlx.drafters.specdiff.drafter import DrawnSpecDiff, SpecDiff, likeliest
from dflash_mlx.verifier.pass_times import PassTimes
from support.law import VOCABULARY, ToyMasked, answers_of, law_distance
from support.toys import ToyTarget

MODEL = ToyMasked(1)
STEPS = [(1, SCHEDULES[0]), *((2, name) for name in SCHEDULES)]


def of(acceptance, temperature, **filters):
    return DecodeConfig(
        "specdiff", acceptance=acceptance, sampling=SamplingConfig(temperature, **filters)
    )


def distance(made, draws, temperature, target=None, **filters):
    """Of `draws` answers that are kept by p/q from the enumerated law, in standard deviations."""
    config = of("reject", temperature, **filters)
    return law_distance(target or ToyTarget(VOCABULARY), made, draws, config)


def as_pays(drafter):
    """Chains cut where more of them would not pay, by what each position is sure of."""
    times = PassTimes((1, 2, 3, 4), (1.0, 1.5, 2.0, 2.5))
    return BatchBudget(drafter, times, Scope(looks_up=False, chains=True), int)


SHAPES = {
    "chain": lambda sampling: (partial(likeliest, nodes=4), 1),
    "tree": lambda sampling: (partial(likeliest, nodes=7), TOP_K),
    "samples": lambda sampling: (partial(sampled, samples=3, seed=sampling.seed, nodes=5), TOP_K),
}
CASES = [
    *(("tree", how) for how in STEPS),
    ("chain", (2, "threshold")),
    ("samples", (1, SCHEDULES[0])),
]


@cache
def plain_answers(temperature):
    """Of a hundred seeds; test_law.py says which law they follow."""
    made, config = (lambda sampling: NoDraft()), of("match", temperature)
    return answers_of(ToyTarget(VOCABULARY), made, 100, config)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("shape", "how"), CASES, ids=str)
def test_matched_answers_are_the_plain_ones_of_their_seeds_and_so_of_that_law(
    shape, how, temperature
):
    def made(sampling):
        return SpecDiff(MODEL, None, Denoising(*how), *SHAPES[shape](sampling))

    answers = answers_of(ToyTarget(VOCABULARY), made, 100, of("match", temperature))
    assert answers == plain_answers(temperature)


def drawn(sampling, how=(1, SCHEDULES[0]), weighed=False, kind=DrawnSpecDiff, model=MODEL):
    return kind(model, None, Denoising(*how), sampling, weighed)


IN_ORDER_STEPS = [(1, SCHEDULES[0]), (2, IN_ORDER), (3, IN_ORDER)]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("how", IN_ORDER_STEPS, ids=str)
def test_rejection_follows_the_law_for_one_pass_and_left_to_right(how, temperature):
    assert distance(partial(drawn, how=how), 600, temperature) < 4


@pytest.mark.parametrize("how", IN_ORDER_STEPS, ids=str)
def test_rejection_follows_the_law_where_chains_are_cut_by_what_pays(how):
    made = partial(drawn, how=how, weighed=True)
    assert distance(lambda sampling: as_pays(made(sampling)), 600, 0.7) < 4


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 2}], ids=str)
def test_rejection_follows_the_law_with_filters(filters):
    assert distance(partial(drawn, how=(3, IN_ORDER)), 600, 0.7, **filters) < 4


class SurestFirst(DrawnSpecDiff):
    """The wrong rule: the surest token is drawn first, the others given it, whatever their places.

    q is what each was drawn from, in the pass that fixed it.
    """

    def drawn(self, state, rows):
        first, second = mx.random.split(self.key(state))
        masks = [self._model.mask] * (rows - 1)
        laws = self.said(state, masks, range(1, rows))
        chances = mx.softmax(laws, axis=-1)
        surest = int(mx.argmax(chances.max(axis=-1)).item())
        token = mx.random.categorical(laws[surest], key=first)
        masks[surest] = int(token.item())
        others = [place for place in range(1, rows) if place != surest + 1]
        tokens, q = np.zeros(rows - 1, np.int64), np.array(chances)
        tokens[surest] = masks[surest]
        if others:
            rest = self.said(state, masks, others)
            at = [place - 1 for place in others]
            tokens[at] = np.array(mx.random.categorical(rest, key=second))
            q[at] = np.array(mx.softmax(rest, axis=-1))
        return mx.array(tokens).astype(state.anchor.dtype), mx.array(q), chances.max(axis=-1)

    def said(self, state, hidden, places):
        block = mx.array([*state.anchor.tolist(), *hidden])
        return tempered(self._model.logits(state.context, block, places), self.sampling)


def toy(base, *links):
    """Flat but for `base` [place, token] and what one place says of another: (from, to, [V, V])."""
    model = ToyMasked(0)
    model.base[:], model.links[:] = np.array(base)[None], 0.0
    for source, place, table in links:
        model.links[source, place] = table
    return model


FLAT = [0.0] * VOCABULARY
TELLS = 4 * np.eye(VOCABULARY)  # this token, then that one


def test_the_law_test_notices_p_over_q_of_tokens_that_were_fixed_out_of_order():
    """The second place is the surest and says what the first one is, and tokens like to repeat."""
    model = toy([FLAT, FLAT, [1.0, 0.5, 0.0, 0.0], FLAT], (2, 1, TELLS), (1, 2, TELLS))
    target = ToyTarget(VOCABULARY)
    target.table[:] = 0.7 * np.eye(VOCABULARY)[None]

    def far(**how):
        return distance(partial(drawn, model=model, **how), 1500, 1.0, target)

    assert far(kind=SurestFirst) > 4
    assert far(how=(2, IN_ORDER)) < 4


def test_the_law_test_notices_chains_that_are_cut_by_what_later_passes_say(monkeypatch):
    """Later passes know the tokens drawn before: a chain that they cut depends on its own."""
    whole = DrawnSpecDiff.drawn

    def by_last_passes(self, *given):
        tokens, q, _ = whole(self, *given)
        return tokens, q, q.max(axis=-1)

    some = 6 * np.diag([1.0, 1.0, 0.0, 0.0])  # say what comes next, the others do not
    model = toy([FLAT, [1.1, 0.0, 0.0, 0.0], FLAT, FLAT], (1, 2, some), (2, 3, some))
    made = partial(drawn, how=(3, IN_ORDER), weighed=True, model=model)

    def cut(sampling):
        return SureOnes(made(sampling))

    assert distance(cut, 1000, 1.0) < 4
    monkeypatch.setattr(DrawnSpecDiff, "drawn", by_last_passes)
    assert distance(cut, 1000, 1.0) > 4


class SureOnes:
    """Keeps a chain whose drafter is sure of its last token, and no other."""

    rounds_ahead = 0

    def __init__(self, drafter):
        self._drafter, self.name, self.aux_layers = drafter, drafter.name, drafter.aux_layers
        self.new_context = drafter.new_context

    def propose(self, states, budget):
        return [self._cut(proposal) for proposal in self._drafter.propose(states, budget)]

    def _cut(self, proposal):
        sure = len(proposal.tree) == 1 or proposal.tree.logprobs[-1] > np.log(0.6)
        return proposal if sure else proposal.part([0])
