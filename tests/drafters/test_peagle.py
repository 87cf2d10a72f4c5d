"""P-EAGLE: one pass makes the states of all depths, and every path and tree goes by these."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.drafters.autoregressive import Chain, DrawnChain, GrownTree
from dflash_mlx.drafters.eagle3.model import EagleModel
from dflash_mlx.train.paired import EagleTrainee
from support import reference_peagle
from support.decoding import path_to, paths_of
from support.drafting import TOLERANCE, Parallel, difference
from support.law import chi_square
from support.reference_peagle import FORMATS, logits

NAMES = [f"eagle3, parallel, {name}" for name in FORMATS]
DEPTHS = {"raw": 7, "automodel": 6, "speculators": 6}


def laws(subject: Any, text: Any, anchor: int, depths: int, temperature: float = 1.0) -> Any:
    """[depths, V] probabilities, by the reference alone."""
    given = subject.tensors, subject.raw, subject.tables, *text, [anchor] * depths
    scores = logits(*given) / temperature
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("name", DEPTHS)
def test_a_draft_is_as_deep_as_the_drafter_was_trained_and_takes_one_pass(drafting, name):
    subject = drafting(f"eagle3, parallel, {name}")
    model, depths, text = subject.model, DEPTHS[name], subject.text(9)
    assert model.block_size == depths + 1
    passes, step = [], model.module.step
    model.module.step = lambda *given: passes.append(len(given[0])) or step(*given)
    try:
        tree = Chain(model).draft(subject.state(7, text), 100).tree
    finally:
        model.module.step = step
    assert passes == [depths]
    assert list(tree.drafted) == laws(subject, text, 7, depths).argmax(axis=-1).tolist()
    assert np.array(model.try_out(subject.context(text))).shape == (depths, 97)


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_a_path_depends_on_its_depth_alone(drafting, name):
    subject = drafting(name)
    draft = subject.model.begin(subject.behind(0, 7))
    root = draft.logits(mx.array([7]), [-1])
    once = draft.logits(mx.array([3, 50]), [0, 0])
    twice = draft.logits(mx.array([8, 9, 10]), [1, 2, 2])
    for found, depth in ((root, 1), (once, 2), (twice, 3)):
        expected = subject.after(subject.text(9), [7, *range(depth - 1)])
        for row in np.array(found):
            assert difference(row, expected) < TOLERANCE
    ranked = draft.ranked(mx.array([1]), [3], 5)
    expected = subject.after(subject.text(9), [7, 0, 0, 0])
    assert ranked.tokens[0].tolist() == np.argsort(-expected)[:5].tolist()


@pytest.mark.parametrize(("branches", "nodes"), [(1, 7), (3, 20)])
def test_a_tree_holds_the_likeliest_products_of_the_depths(drafting, branches, nodes):
    subject = drafting("eagle3, parallel, speculators")
    text = subject.text(8)
    tree = GrownTree(subject.model, 4, branches, nodes).draft(subject.state(7, text), 100).tree
    law = np.log(np.maximum(laws(subject, text, 7, 3), 1e-300))
    for node, path in enumerate(paths_of(tree)):
        reached = sum(tree.logprobs[i] for i in path_to(tree, node))
        assert reached == pytest.approx(sum(law[d, t] for d, t in enumerate(path)), abs=1e-3)
    best = np.argsort(-law, axis=-1)[:, :branches]
    assert all(token in best[d] for path in paths_of(tree) for d, token in enumerate(path))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_chains_follow_the_product_of_the_depths_and_say_so(
    drafting, monkeypatch, temperature
):
    subject = drafting("eagle3, parallel, raw")
    text = subject.text(9)
    state, law = subject.state(7, text), laws(subject, text, 7, 2, temperature)
    states = subject.model.block(state.context, mx.array([7]))
    monkeypatch.setattr(EagleModel, "block", lambda *given: states)  # the pass is always alike
    draws = []
    for seed in range(800):
        sampling = SamplingConfig(seed=seed, temperature=temperature)
        proposal = DrawnChain(subject.model, 3, sampling).draft(state, 100)
        draws.append(proposal.tree.drafted)
        assert seed or np.abs(np.array(proposal.q) - law).max() < TOLERANCE
    pairs = {(a, b): law[0, a] * law[1, b] for a in range(97) for b in range(97)}
    assert chi_square(pairs, draws) < 4
    turned = {(a, b): law[1, a] * law[0, b] for a, b in pairs}
    assert chi_square(turned, draws) > 4, "the test notices another law"


def test_one_depth_needs_no_masks(tmp_path):
    raw = reference_peagle.raw(num_depths=1, layer_types=["full_attention"] * 9)  # a target's
    subject = Parallel(tmp_path, *reference_peagle.case(raw))
    text = subject.text(5)
    assert subject.model.block_size == 2
    tree = Chain(subject.model).draft(subject.state(7, text), 100).tree
    assert list(tree.drafted) == [subject.after(text, [7]).argmax()]


def test_no_step_is_asked_for_and_none_counts_as_a_pass(drafting):
    """A budget that weighs steps would stop at the first, which takes as long as all."""
    sampling = SamplingConfig(seed=1, temperature=1.0)
    for name, deep in (("eagle3, parallel, raw", 7), ("eagle3, raw", 1)):
        subject = drafting(name)
        drawn = DrawnChain(subject.model, None, sampling, weighed=True)
        for drafter in (GrownTree(subject.model, None, 2, 40), drawn):
            proposal = drafter.asking(lambda chance, steps: False).draft(subject.behind(0, 7), 99)
            assert max(proposal.tree.depths) == deep and proposal.steps == ()
            whole = drafter.draft(subject.behind(0, 7), 99)
            assert len(whole.steps) == (0 if deep > 1 else 6)


MISTAKES = {
    "masks have no state": lambda model: mx.zeros_like(model._masked),
    "masks have the state of the text": lambda model: model._masked * 0 + 1,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_reference_notices_another_state_of_the_masks(drafting, monkeypatch, mistake):
    subject = drafting("eagle3, parallel, automodel")
    text, wrong = subject.text(9), MISTAKES[mistake](subject.model)
    monkeypatch.setitem(vars(subject.model), "_masked", wrong)
    found = subject.found(subject.context(text), 7, 4)
    assert difference(found[:1], subject.expected(text, 7, 1)) < TOLERANCE, "the anchor's row"
    assert difference(found, subject.expected(text, 7, 4)) > 100 * TOLERANCE


def test_it_is_not_trained(drafting):
    subject = drafting("eagle3, parallel, raw")
    with pytest.raises(DFlashError, match="drafts of one pass"):
        EagleTrainee.read(subject.folder, subject.target)
