"""How blocks are denoised, what they become, and that answers stay what they are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.growth.grow import Ranked, best_first, follow
from dflash_mlx.drafters.methods import make_drafter, settle
from dflash_mlx.drafters.paper import sampled
from dflash_mlx.drafters.specdiff.drafter import (
    IN_ORDER,
    SCHEDULES,
    SURE,
    THRESHOLD,
    Denoising,
    SpecDiff,
    denoise,
    likeliest,
)
from dflash_mlx.engine.pair import Capabilities, Pair
from dflash_mlx.engine.state import State
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.model import Target
from support import masked_formats
from support.configs import config_with
from support.decoding import open_with, paths_of
from support.families import make_model
from support.hybrids import plain_answer
from support.law import ToyMasked
from support.toys import Letters, ToyCache, prompt_of

ALL = [(steps, name) for name in SCHEDULES for steps in (2, 3, 4, 9)] + [(1, SCHEDULES[0])]


# Denoising


class Passes:
    """Says something else of every place in every pass, and remembers what it was asked."""

    def __init__(self, seed: int) -> None:
        self.rng, self.asked = np.random.default_rng(seed), []

    def __call__(self, known, masked):
        logprobs = -np.sort(self.rng.exponential(0.3, (len(masked), 3)), axis=1)
        ranked = Ranked(self.rng.integers(100, size=(len(masked), 3)), logprobs)
        self.asked.append((dict(known), list(masked), ranked))
        return ranked


@given_by(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from(ALL))
@settings(max_examples=150)
def test_every_place_keeps_what_the_last_pass_in_which_it_was_masked_said(seed, n, how):
    steps, schedule = how
    look, places = Passes(seed), range(1, n + 1)
    found = denoise(look, places, Denoising(steps, schedule))
    assert len(look.asked) <= min(steps, n)
    for row, place in enumerate(places):
        _, masked, ranked = [asked for asked in look.asked if place in asked[1]][-1]
        at = masked.index(place)
        assert found.tokens[row].tolist() == ranked.tokens[at].tolist()
        assert found.logprobs[row].tolist() == ranked.logprobs[at].tolist()
    for (known, masked, ranked), (after, left, _) in zip(look.asked, look.asked[1:], strict=False):
        fixed = [place for place in masked if place not in left]
        assert fixed and set(left) <= set(masked)
        best = {place: ranked.best[masked.index(place)] for place in fixed}
        assert after == {**known, **best}, "and never changes what is fixed"
        sure = {place: ranked.confidences[masked.index(place)] for place in masked}
        if schedule == IN_ORDER:
            assert fixed == masked[: len(fixed)]
        else:
            assert min(sure[p] for p in fixed) >= max(sure[p] for p in left)
        if schedule == THRESHOLD:
            assert len(fixed) == max(1, sum(c >= SURE for c in sure.values()))
    if schedule != THRESHOLD:
        left = [*(len(masked) for _, masked, _ in look.asked), 0]
        shares = [before - after for before, after in zip(left, left[1:], strict=False)]
        assert len(shares) == min(steps, n) and shares == sorted(shares, reverse=True)
        assert max(shares) - min(shares) <= 1, "every pass fixes its share"


# Drafts


def state_of(drafter, anchor=2, remaining=9) -> State:
    state = State(ToyCache(), drafter.new_context())
    open_with(state, anchor)
    state.end = remaining
    return state


ONE_PASS = Denoising()


def toy(how=ONE_PASS, model=None, nodes=6, width=4):
    return SpecDiff(model or ToyMasked(1), None, how, lambda r, at: likeliest(r, at, nodes), width)


@pytest.mark.parametrize(("steps", "schedule"), ALL)
@pytest.mark.parametrize("remaining", [1, 2, 4])
def test_a_block_takes_as_many_passes_as_asked_for_and_room_for_one_token_none(
    steps, schedule, remaining
):
    model = ToyMasked(1)
    drafter = toy(Denoising(steps, schedule), model=model, width=1)
    tree = drafter.draft(state_of(drafter), remaining).tree
    assert model.calls <= min(steps, remaining - 1) and (model.calls > 0) == (remaining > 1)
    if schedule != THRESHOLD:
        assert model.calls == min(steps, remaining - 1)
    assert max(tree.depths) == remaining - 1
    paths_of(tree)


def test_one_pass_grows_the_same_tree_as_any_drafter_from_its_distributions():
    drafter, model = toy(), ToyMasked(1)
    block = mx.array([2, *[model.mask] * 3])
    expected = best_first(follow(model.ranked(None, block, (1, 2, 3), 4)), 6)
    found = drafter.draft(state_of(drafter), 9).tree
    assert (found.drafted, found.parents) == (expected.drafted, expected.parents)
    assert found.logprobs == expected.logprobs and set(found.sources[1:]) == {"first"}


def test_a_later_pass_knows_what_the_first_one_fixed():
    model, drafter = ToyMasked(1), toy(Denoising(3, IN_ORDER), nodes=4, width=1)
    known, chain = [], drafter.draft(state_of(drafter), 9).tree
    for place in (1, 2, 3):
        hidden = [*known, *[model.mask] * (3 - len(known))]
        logits = np.array(model.logits(None, mx.array([2, *hidden]), [place]))[0]
        known.append(int(logits.argmax()))
    assert list(chain.drafted) == known


def test_of_too_many_samples_the_nodes_that_are_likeliest_reached_stay():
    block = mx.array([2, *[ToyMasked(1).mask] * 3])
    ranked = ToyMasked(1).ranked(None, block, (1, 2, 3), 4)
    tree = sampled(ranked, position=5, samples=32, seed=1, nodes=99)
    assert tuple(ranked.best) in paths_of(tree) and len(tree) > 10
    assert sampled(ranked, 5, 32, 1, 99) == tree != sampled(ranked, 6, 32, 1, 99)
    for nodes in (2, 5, 9, len(tree) - 1):
        part = sampled(ranked, position=5, samples=32, seed=1, nodes=nodes)
        assert len(part) == nodes
        chances = [reached_by(ranked, path) for path in paths_of(tree)]
        kept = [reached_by(ranked, path) for path in paths_of(part)]
        assert set(paths_of(part)) <= set(paths_of(tree))
        assert np.allclose(sorted(kept), sorted(chances)[-nodes:])


def reached_by(ranked, path):
    """The probability of a path, position by position."""
    at = [ranked.tokens[row].tolist().index(token) for row, token in enumerate(path)]
    return np.exp(sum(ranked.logprobs[row, column] for row, column in enumerate(at)))


# Settings

REJECTED = {"acceptance": "reject"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "steps is 0; choose 1 to"),
        ({"steps": 200}, "steps is 200"),
        ({"schedule": "random"}, "schedule is 'random'; choose one of confidence, left-to-right"),
        (
            {"acceptance": "reject", "steps": 2, "schedule": "confidence"},
            "the confidence schedule with",
        ),
        ({**REJECTED, "steps": 3, "schedule": THRESHOLD}, "threshold schedule with 3"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(given, said):
    with pytest.raises(DFlashError, match=said) as failure:
        config = settle(config_with("specdiff", **given), Capabilities())
        config.options.check(config)
    assert failure.value.next_step


# Answers (of every shape with this target: test_methods.py; laws: test_law.py)


def answer(session, prompt):
    return [token for delta in session.stream(prompt) for token in delta.tokens]


@pytest.mark.parametrize("window", [None, 12])
def test_the_turns_of_a_conversation_are_answered_as_without_drafts(tmp_path, window):
    """Turns that go on, go back and begin anew, with long and short prompts."""
    target = Target(make_model("llama"), 500, "tiny")
    model = masked_formats.small(tmp_path, target, draft_window=window)
    session = Session(Pair(target, Letters(), (model,)), config_with("specdiff", max_tokens=20))
    said = prompt_of(1, 150)
    for prompt in (said, [*said, *prompt_of(2, 9)], said[:100], prompt_of(3, 90), said[:101]):
        assert answer(session, prompt) == plain_answer(target, prompt, 20)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "bailing_hybrid"])
def test_targets_that_verify_chains_only_and_hybrids_are_drafted_for(tmp_path, family):
    target = Target(make_model(family), 300, family)
    pair = Pair(target, Letters(), (masked_formats.small(tmp_path, target),))
    prompt = prompt_of(4, 50)
    for chain in ({}, {"steps": 2}, {"block_size": 4}):
        config = config_with("specdiff", max_tokens=16, **chain)
        assert answer(Session(pair, config), prompt) == plain_answer(target, prompt, 16)
    for tree in ({"budget": 9}, {"branches": 3}):
        config = config_with("specdiff", max_tokens=16, **tree)
        if target.takes_trees:
            assert answer(Session(pair, config), prompt) == plain_answer(target, prompt, 16)
        else:
            with pytest.raises(DFlashError, match="recurrent layers"):
                make_drafter(pair, config)
