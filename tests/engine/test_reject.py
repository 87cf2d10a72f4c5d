"""The arithmetic of rejection sampling, and its rule on chains whose q is known."""

from functools import partial
from itertools import islice
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.sampling import Sampler, tempered
from dflash_mlx.core.tree import Tree, accept
from dflash_mlx.drafters.block_diffusion import DrawnBlock
from dflash_mlx.drafters.methods import draws_drafts, make_drafter
from dflash_mlx.drafters.specdiff.drafter import (
    IN_ORDER,
    SCHEDULES,
    Denoising,
    DrawnSpecDiff,
)
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.engine.verify import RejectionSampling, Verdict, kept, remainder
from dflash_mlx.verifier.model import Target
from support.decoding import behind, go_on, rounds, run, start
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.law import VOCABULARY, ToyDrafter, ToyMasked, law_distance
from support.toys import ToyCache, ToyTarget


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = Target(make_model("llama"), 200, "tiny")
    model = drafter_folder(tmp_path_factory.mktemp("drafter"), [0, 2], 1, target)
    return Pair(target, None, (model,), "tiny")


laws = st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any)


def law(weights):
    return np.array(weights, dtype=np.float32) / np.float32(sum(weights))


@given(laws, laws)
@settings(max_examples=100)
def test_kept_drafts_and_replacements_together_have_the_targets_law(p, q):
    """p(x) = min(p, q)(x) + (1 - sum min(p, q)) remainder(x), for every token x."""
    p, q = law(p), law(q)
    agreed = np.minimum(p, q)
    rest = np.array(remainder(mx.array(p), mx.array(q)))
    assert np.allclose(agreed + (1 - agreed.sum()) * rest, p, atol=1e-6)
    assert np.isclose(rest.sum(), 1, atol=1e-5)
    assert (rest >= 0).all()


@given(laws, laws, st.integers(0, 4))
@settings(max_examples=100)
def test_a_draft_is_kept_with_probability_p_over_q(p, q, token):
    p, q = law(p), law(q)
    assume(q[token] > 0)
    share = p[token] / q[token]

    def keeps(u):
        return kept(mx.array(p)[None], mx.array(q)[None], mx.array([token]), mx.array([u])).item()

    assert all(keeps(u) for u in (0.0, 0.5, 0.99) if u < share - 0.001)
    assert not any(keeps(u) for u in (0.0, 0.5, 0.99) if u > share + 0.001)
    assert keeps(0.0) == (p[token] > 0)


def test_where_nothing_is_left_the_target_itself_is_drawn_from():
    p = mx.array([0.25, 0.75])
    assert remainder(p, p).tolist() == [0.25, 0.75]


def test_a_proposal_that_was_cut_to_its_share_is_matched_not_rejected():
    class Wide(EachAlone):
        def draft(self, state, remaining):
            return Proposal(Tree((1, 2), (-1, 0, 0)), mx.ones((2, 4)) / 4)

    state = State(ToyCache(), None)
    state.end = 9
    (whole,), (cut,) = (Wide().propose([state], rows) for rows in (3, 2))
    assert (len(whole.tree), whole.q is None) == (3, False)
    assert (cut.tree, cut.q) == (Tree((1,), (-1, 0)), None)


def verdict_of(tree, logits, q=None):
    proposal = Proposal(tree, None if q is None else mx.array(q))
    return Verdict(proposal, tree.ids(mx.array([0])), mx.array(logits))


HERE = SimpleNamespace(next_position=8, tokens=[3] * 8)
SAMPLER = Sampler(SamplingConfig(temperature=1.0, seed=3))


def test_other_trees_are_matched():
    logits = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    tree = Tree((1, 2), (-1, 0, 0))
    verdict = verdict_of(tree, logits)
    expected = accept(tree, verdict.choices(SAMPLER, HERE))
    accepted = RejectionSampling(SAMPLER).accept(verdict, HERE)
    assert (accepted.path, accepted.tokens) == (expected.path, expected.tokens)


def drawn(seed, temperature=0.7, remaining=4, **filters):
    drafter = DrawnBlock(ToyDrafter(1), None, SamplingConfig(temperature, seed=seed, **filters))
    return drafter.draft(behind(drafter, 2), remaining)


def test_an_answer_draws_anew_though_its_first_round_was_plain():
    drafter = DrawnBlock(ToyDrafter(1), None, SamplingConfig(1.0))
    drafts = set()
    for _ in range(12):
        state = behind(drafter, 2)
        state.last = accept(Tree.chain(), lambda path: 2)
        drafts.add(drafter.draft(state, 4).tree.drafted)
    assert len(drafts) > 3


def test_drafts_pass_the_filters_that_the_target_uses():
    proposal = drawn(0, top_k=2)
    assert (np.array(proposal.q) > 0).sum(axis=-1).tolist() == [2, 2, 2]


def test_one_seed_gives_one_draft_and_room_for_one_token_none():
    assert drawn(5).tree.drafted == drawn(5).tree.drafted
    assert len({drawn(seed).tree.drafted for seed in range(20)}) > 5
    assert len(drawn(0, remaining=1).tree) == 1
    assert len(drawn(0, remaining=3).tree) == 3


@pytest.mark.parametrize(
    ("method", "acceptance", "sampling", "drawn"),
    [
        ("dflash", "reject", {"temperature": 0.7, "seed": 1}, True),
        ("dflash", "reject", {}, False),
        ("ddtree", "reject", {"temperature": 0.7}, False),
        ("dflash", "match", {"temperature": 0.7}, False),
        ("dflash", "auto", {"temperature": 0.7}, True),
        ("dflash", "auto", {"temperature": 0.7, "seed": 1}, False),
        ("dflash", "auto", {}, False),
    ],
)
def test_dflash_draws_with_a_temperature_where_no_answer_has_to_be_kept(
    method, acceptance, sampling, drawn
):
    config = DecodeConfig(method, acceptance=acceptance, sampling=SamplingConfig(**sampling))
    assert draws_drafts(config) == drawn


def test_unknown_acceptance_is_refused():
    with pytest.raises(DFlashError, match="acceptance is 'both'"):
        DecodeConfig(acceptance="both")


def test_real_networks_draw_and_reject_and_an_abandoned_answer_goes_on(pair):
    """At a high temperature, where the laws of random networks overlap."""
    sampling = SamplingConfig(8.0, seed=1)
    config = DecodeConfig("dflash", 8, max_tokens=30, sampling=sampling, acceptance="reject")
    drafter = make_drafter(pair, config)
    assert isinstance(drafter, DrawnBlock)
    state = start(pair.target, drafter, [1, 2, 3], config)
    said, count = [], 0
    for accepted in rounds(pair.target, drafter, state, config):
        said += accepted.tokens
        count += 1
        if len(said) >= 15:
            break
    assert count < len(said), "some drafts were kept"
    assert state.tokens == [1, 2, 3, *said]
    assert state.context.length == state.position == 2 + len(said)
    assert len(run(pair.target, drafter, state, config)) == 30


@pytest.mark.parametrize("seed", [None, 3])
def test_every_answer_of_a_session_draws_drafts_of_its_own_unless_seeded(pair, seed):
    sampling = SamplingConfig(2.0, seed=seed)
    config = DecodeConfig("dflash", 8, max_tokens=6, acceptance="reject", sampling=sampling)
    drafter = make_drafter(pair, config)
    state = start(pair.target, drafter, [1, 2, 3, 4], config)
    drafts = set()
    for _ in range(12):
        go_on(pair.target, drafter, state, [1, 2, 3, 4], config)
        _, second = islice(rounds(pair.target, drafter, state, config), 2)
        drafts.add(second.tree.drafted)
    assert len(drafts) == 1 if seed is not None else len(drafts) > 6


# What would break SpecDiff's law: q of tokens out of order, and chains cut by later passes.


def distance(made, draws, target=None):
    """Of `draws` answers that are kept by p/q from the enumerated law, in standard deviations."""
    config = DecodeConfig("specdiff", acceptance="reject", sampling=SamplingConfig(1.0))
    return law_distance(target or ToyTarget(VOCABULARY), made, draws, config)


def specdiff(sampling, model, kind=DrawnSpecDiff, how=(1, SCHEDULES[0]), weighed=False):
    return kind(model, None, Denoising(*how), sampling, weighed)


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
        return distance(partial(specdiff, model=model, **how), 1500, target)

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
    made = partial(specdiff, how=(3, IN_ORDER), weighed=True, model=model)

    def cut(sampling):
        return SureOnes(made(sampling))

    assert distance(cut, 1000) < 4
    monkeypatch.setattr(DrawnSpecDiff, "drawn", by_last_passes)
    assert distance(cut, 1000) > 4


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
