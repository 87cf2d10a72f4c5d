"""Lookups beside drafts, in plain rounds, and what is learned of them."""

from __future__ import annotations

import numpy as np

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.experience import Cut
from dflash_mlx.drafters.growth.reliability import Sizes
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.verifier.pass_times import PassTimes
from support import decoding
from support.timed import FLAT, VOCABULARY, Case, Clock, Honest, TimedTarget

NOTHING_MORE = Sizes(np.array([1.0]), np.arange(1), np.zeros(1))
UNLIKELY = Tree((5,), (-1, 0), (0.0, float(np.log(0.01))), ("", "lookup"), (0.0, 0.0))


def promise(tokens: float, seconds: float = 1.0) -> Cut:
    return Cut([], tokens, 0.0, seconds, NOTHING_MORE)


def arms():
    """What has been learned, and its two arms."""
    known = BatchBudget(Honest(0.1, lambda i: 0.5), FLAT).experience
    return known, *known.arms


def test_lookups_join_plain_rounds_and_drafts_at_no_cost():
    target = TimedTarget(Clock(), FLAT)
    target.table[:] = 0.0
    for token in range(VOCABULARY):  # an answer that repeats itself
        target.table[:, token, (token + 1) % VOCABULARY] = 5.0
    case = Case(target, Honest(5.0, lambda i: 0.01), 300, Scope())
    assert case.seconds < 100, "far less than the 300 passes of plain decoding"
    assert "lookup" in {source for r in case.rounds for source in r.proposal.tree.sources}


def test_an_answer_does_not_begin_as_if_lookups_were_verified_in_a_pass_over_one_row():
    dear = PassTimes((1, 96), (1.0, 20.0))
    case = Case(dear, Honest(0.1, lambda i: 0.5), tokens=20, scope=Scope())
    plain, *_ = case.drafter.experience.arms
    for _ in range(16):
        promised = Sizes(np.array([1.0, 1.6, 2.0, 2.4]), np.arange(4), np.zeros(4))
        cut = Cut([], 2.4, 0.0, float(dear.of(4)), promised)
        plain.expect(cut)
    before = plain.rate
    _, state = case.start(10)
    case.drafter.propose([state], 96)
    assert plain.rate < 1.2 * before


def test_a_draft_is_made_where_lookups_find_nothing_however_well_they_did_before():
    known, plain, draft = arms()
    for _ in range(16):
        plain.expect(promise(6.0, 1.1))
        draft.expect(promise(4.0, 1.1), 6.0)
    assert known.choose(promise(6.0, 1.1))[0] is plain
    draft.expect(promise(3.0, 1.1), 1.0)
    assert known.choose(promise(1.0))[0] is draft


def test_drafts_beside_lookups_that_found_nothing_are_taken_to_bring_less():
    known, plain, draft = arms()
    for _ in range(40):
        plain.expect(promise(1.0))
        draft.expect(promise(4.5, 3.0), 6.0)
    assert known.choose()[0] is draft
    assert known.choose(promise(1.0))[0] is plain


def test_drafts_are_worth_something_where_lookups_that_found_nothing_had_promised_more():
    """As drawn chains do, which lookups do not join."""
    known, plain, draft = arms()
    for _ in range(40):
        plain.expect(promise(8.0))
        draft.expect(promise(3.0, 1.1), 8.0)
    assert known.choose(promise(1.0))[0] is draft


def looking(drafter, drafts: bool):
    """A budget whose lookups find one unlikely token, and a state behind a prompt."""
    target = drafter.target = TimedTarget(Clock(), FLAT)
    budget = BatchBudget(drafter, FLAT, Scope(("lookup",), drafts), target.clock)
    budget._lookup.draft = lambda state, most: UNLIKELY
    return budget, decoding.start(target, budget, [1, 2, 3], DecodeConfig(max_tokens=40))


def test_lookups_are_judged_apart_from_the_draft_that_was_verified():
    budget, state = looking(Honest(0.1, lambda i: 0.5), True)
    for _ in range(2):
        (proposal,) = budget.propose([state], 96)
        state.last = Accepted(proposal.tree, (0,), 7)
    tried = budget.experience.reliability.tried.sum(), budget.experience.lookups.tried.sum()
    assert len(proposal.tree) > 2 and tried == (2, 1), "first tokens of both; of lookups alone"


class Unread:
    """A token that nobody may wait for yet."""

    ready = False

    def item(self) -> int:
        assert self.ready
        return 7


def test_what_lookups_promised_is_judged_by_tokens_that_nobody_had_to_wait_for():
    """One round looks up, eight do not and start before it is read, the next one looks again."""
    budget, state = looking(NoDraft(), False)
    token, known = Unread(), budget.experience
    for i in range(10):
        token.ready = i == 9
        (proposal,) = budget.propose([state], 96)
        state.last = Accepted(proposal.tree, (0,), token)
        assert known.lookups.tried.sum() == (i == 9)
    assert known.reliability.tried.sum() == 0
