"""Every round is spent on what gives most tokens per second, and the answer stays the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.budget import BatchBudget, Scope
from dflash_mlx.drafters.experience import Average, Experience
from dflash_mlx.drafters.growth.reliability import never, reach, worth_keeping
from dflash_mlx.drafters.round_times import RoundTimes
from dflash_mlx.engine.drafter import Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.pass_times import ROWS, PassTimes
from support import decoding
from support.timed import FLAT, VOCABULARY, Case, Clock, Honest, TimedTarget

BRISK = PassTimes((1, 16, 96), (0.02, 0.032, 0.18))
STEEP = PassTimes((1, 2, 3, 4, 5, 96), (1.0, 1.05, 1.1, 1.15, 2.0, 90.0))
RISING = PassTimes((1, 16, 96), (1.0, 1.6, 9.0))


class Unlucky(Honest):
    """As honest, but its first drafts are wrong, whatever they promise."""

    def __init__(self, seconds, sure, wrong, seed=1):
        super().__init__(seconds, sure, seed=seed)
        self.wrong = wrong

    def draft(self, state: State, remaining: int) -> Proposal:
        proposal, self.wrong = super().draft(state, remaining), self.wrong - 1
        if self.wrong < 0:
            return proposal
        drafts = tuple((token + 5) % VOCABULARY for token in proposal.tree.drafted)
        return Proposal(replace(proposal.tree, drafts=drafts))


def case_of(times, *drafter, tokens=400):
    """A case with one drafter."""
    return Case(times, Honest(*drafter), tokens)


def drafted(rounds):
    """Of each round, whether anything was drafted."""
    return [len(r.proposal.tree) > 1 for r in rounds]


def with_trees(dearer: float) -> PassTimes:
    """Branches make a pass so much dearer, as on recurrent targets."""
    return replace(FLAT, trees=PassTimes((1, 2, 96), (1.0, dearer, dearer)))


# Which mode is most of what is chosen, and how many times the speed of plain decoding at least;
# the drafter's seconds, how sure it is, and of how many siblings one is right
MODES = {
    "wrong drafts": ("plain", 1 / 1.05, RISING, (0.3, 0.05, 1)),
    "right but slow drafts": ("plain", 1 / 1.05, RISING, (8.0, 0.8, 1)),
    "width costs much": ("chain", 1 / 1.05, STEEP, (0.1, 0.9, 1)),
    "width is free": ("tree", 1 / 1.05, FLAT, (0.1, 0.9, 3)),
    "branches cost little": ("tree", 2.5, with_trees(1.2), (0.1, 0.9, 2)),
    "branches cost much": ("chain", 1.3, with_trees(4.0), (0.1, 0.9, 2)),
    # where only chains are verified, their length is what pays
    "chains, width is free": ("chain", 2.5, FLAT, (0.1, 0.9, 2)),
    "chains, width costs much": ("chain", 2.2, STEEP, (0.1, 0.9, 2)),
    "chains, slow drafts": ("chain", 1.1, RISING, (0.5, 0.6, 2)),
    "chains, wrong drafts": ("plain", 0.97, RISING, (0.5, 0.1, 2)),
}


@pytest.mark.parametrize("name", MODES)
def test_the_mode_is_the_one_that_pays(name):
    mode, least, times, (seconds, sure, width) = MODES[name]
    chains = name.startswith("chains")
    scope = Scope(looks_up=False, chains=chains)
    case = Case(times, Honest(seconds, lambda i: sure, width), scope=scope)
    assert case.modes.get(mode, 0) > 0.8
    assert case.plain_seconds / case.seconds > least
    assert not chains or all(r.proposal.tree.is_chain for r in case.rounds)


def test_of_a_lookup_and_a_draft_that_disagree_a_chain_follows_the_likelier():
    tree = Tree((5, 6, 7), (-1, 0, 1, 2), (0.0, -0.1, -0.1, -3.0), ("", *["draft"] * 3))
    merged = tree.merge([5, 8, 9], [-0.3, -2.0, -0.1], "lookup")
    reached = reach(merged, np.exp(merged.logprobs))
    (kept,), *_ = worth_keeping([merged], [reached], FLAT.of, 0.1, 96, never)
    assert merged.prune(kept).drafted == (5, 6, 7)
    (kept,), *_ = worth_keeping([merged], [reached], STEEP.of, 0.1, 3, never)
    assert merged.prune(kept).drafted == (5, 6)


def test_drafts_that_never_pay_cost_little():
    case = case_of(RISING, 0.5, lambda i: 0.03, tokens=1000)
    assert case.seconds < 1.03 * case.plain_seconds
    tried = [i for i, r in enumerate(case.rounds) if "is tried again" in r.proposal.reason]
    assert tried and tried[-1] > 500, "they are tried again all the same"


def uneven(position: int) -> float:
    return (0.2, 0.8, 0.5)[position % 3]


@pytest.mark.parametrize(("wrong", "mean"), [(1, 0.85), (3, 0.75)], ids=["one", "three"])
def test_drafts_that_pay_a_fifth_are_not_given_up_for_bad_luck(wrong, mean):
    """Sixteen sessions of 150 tokens, each with so many useless drafts at its beginning."""
    shares, seconds = [], 0.0
    for seed in range(16):
        case = Case(RISING, Unlucky(0.4, uneven, wrong, seed), 150)
        shares.append(np.mean(drafted(case.rounds)))
        seconds += case.seconds
    assert np.mean(shares) > mean
    assert seconds / (16 * 150) < 0.88, "seconds per token; plain decoding takes 1"


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_a_drafter_that_is_sure_and_always_wrong_is_soon_given_up(seconds):
    case = Case(RISING, Unlucky(seconds, lambda i: 0.9, wrong=1000), 1000)
    assert case.seconds < 1.03 * 1000


def test_it_notices_when_the_text_becomes_easy_and_when_it_becomes_hard():
    case = case_of(RISING, 0.4, lambda i: 0.9 if 300 <= i < 600 else 0.03, tokens=900)
    position, drafts, rounds = 0, Counter(), Counter()
    for r, has_drafts in zip(case.rounds, drafted(case.rounds), strict=True):
        drafts[position // 100] += has_drafts
        rounds[position // 100] += 1
        position += len(r.accepted.tokens)
    assert min(100 - drafts[k] for k in (1, 2, 7, 8)) > 85, "parked where drafts fail"
    assert drafts[4] + drafts[5] > 0.8 * (rounds[4] + rounds[5])


def test_an_easier_answer_is_noticed_at_its_beginning():
    case = case_of(RISING, 0.4, lambda i: 0.03)
    assert case.modes["plain"] > 0.9
    case.drafter.drafter.sure = lambda position: 0.9
    rounds = case.run(60)
    assert "draft is tried again" in rounds[0].proposal.reason
    assert sum(drafted(rounds[:12])) > 6


def test_parked_rounds_run_ahead_of_the_reader_and_others_do_not():
    assert case_of(RISING, 0.5, lambda i: 0.03).drafter.rounds_ahead == 1
    assert case_of(FLAT, 0.1, lambda i: 0.9).drafter.rounds_ahead == 0


def test_what_one_session_learned_the_next_one_knows():
    case = case_of(RISING, 0.5, lambda i: 0.03)
    before = case.drafter
    case.drafter = BatchBudget(before.drafter, RISING, Scope(looks_up=False), case.clock)
    case.drafter.experience = before.experience
    assert sum(drafted(case.run(30))) <= 2


def test_an_answer_that_is_abandoned_teaches_nothing_wrong():
    case = case_of(RISING, 0.3, lambda i: 0.6)
    config, state = case.start(50)
    next(decoding.rounds(case.target, case.drafter, state, config))
    case.clock.now += 1000.0  # the user thinks
    decoding.go_on(case.target, case.drafter, state, [*state.tokens, 4], config)
    decoding.run(case.target, case.drafter, state, config)
    assert all(arm.seconds < 3 for arm in case.drafter.experience.arms)


def test_rounds_that_wait_for_the_screen_do_not_count_in_full():
    case = case_of(RISING, 0.3, lambda i: 0.6)
    before = [arm.seconds for arm in case.drafter.experience.arms]
    config, state = case.start(20)
    for i, _ in enumerate(decoding.rounds(case.target, case.drafter, state, config)):
        case.clock.now += 500.0 if i == 3 else 0.0
    after = [arm.seconds for arm in case.drafter.experience.arms]
    assert after == pytest.approx(before, rel=0.3)


def test_what_the_reader_takes_is_no_time_of_a_round():
    case = case_of(RISING, 0.3, lambda i: 0.6)
    machine = case.drafter.experience.times.machine
    config, state = case.start(20)
    for _ in decoding.rounds(case.target, case.drafter, state, config):
        case.clock.now += 500.0
        state.paused += 500.0  # as the loop has it
    assert case.drafter.experience.times.machine == pytest.approx(machine, rel=0.01)


@pytest.mark.parametrize("changed", [False, True])
def test_a_changed_tree_is_not_taken_for_the_one_proposed(changed):
    """Whoever replaces a proposal must not be learned from."""
    case = case_of(RISING, 0.1, lambda i: 0.9, tokens=50)
    tried = case.drafter.experience.reliability.tried
    _, state = case.start(9)
    state.end = state.position + 9
    tree = case.drafter.propose([state], 96)[0].tree
    assert len(tree) > 1
    before, state.last = tried.sum(), Accepted(replace(tree) if changed else tree, (0,), 7)
    case.drafter.propose([state], 96)
    assert (case.drafter.experience.reliability.tried.sum() > before) != changed


def test_passes_that_take_longer_than_measured_make_wider_trees_worth_it():
    """As behind a long context: what every pass costs more makes its rows cheaper by comparison."""

    case = Case(TimedTarget(Clock(), RISING, more=10.0), Honest(0.3, lambda i: 0.7), 300)
    assert case.seconds < 0.65 * 300 * 11
    assert np.mean([len(r.proposal.tree) for r in case.rounds[30:]]) > 5


SLOW = {"drafts alone": 1.0, "all rounds": 1.5}


@pytest.mark.parametrize("plain", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("tried", [0, 12])
def test_what_plain_decoding_would_take_is_never_more_than_it_does(plain, tried):
    """Drafted rounds take 1.5 times what was planned; plain ones were tried so often."""
    times, base = RoundTimes(FLAT), 1.0
    for i in range(60 + tried):
        is_plain = i >= 60 or (tried and i % 6 == 0)
        planned = times.plain(1, ()) if is_plain else 0.1 + float(times.of(8))
        took = plain * base if is_plain else 1.5 * (0.1 + base)
        times.learn(1 if is_plain else 8, not is_plain, 0.0 if is_plain else 0.1, took, planned)
    said = times.plain_now(1, ())
    assert said <= plain * 1.05
    assert not tried or said == pytest.approx(plain, rel=0.05)


def test_a_round_takes_what_rounds_of_its_size_have_taken():
    """Plan and truth agree, though sizes are wrong by different shares and one round waits."""
    true, times = {4: 0.106, 8: 0.117, 24: 0.160}, RoundTimes(PassTimes(ROWS, (0.09,) * 10))
    for i in range(90):
        rows = (4, 8, 24)[i % 3]
        planned = 0.02 + float(times.of(rows))
        times.learn(rows, True, 0.02, 1.0 if i == 80 else 0.02 + true[rows], planned)
    for rows, seconds in true.items():
        planned = (0.02 + float(times.of(rows))) * times.machine
        assert planned == pytest.approx(0.02 + seconds, rel=0.05)


def test_a_size_that_was_slow_a_few_times_is_not_ruled_out_for_good():
    times = RoundTimes(FLAT)
    for i in range(90):
        rows, took = (8, 3.0) if i < 5 else (4, 1.1)
        times.learn(rows, True, 0.1, took, 0.1 + float(times.of(rows)))
        if i == 10:
            assert float(times.of(8)) > 1.5 * float(times.of(4))
    assert float(times.of(8)) == pytest.approx(float(times.of(4)))


def test_without_times_trees_are_narrow_until_a_round_tells():
    case = Case(RISING, Honest(0.1, lambda i: 0.9), 60, timed=False)
    widths = [len(r.proposal.tree) for r in case.rounds]
    assert max(widths[:2]) == 4 and max(widths) > 4
    assert case.rounds[0].proposal.plain_seconds is None


@pytest.mark.parametrize(("seconds", "sure"), [(0.5, 0.03), (8.0, 0.8)])
def test_without_times_drafts_that_do_not_pay_are_parked_in_the_first_answer(seconds, sure):
    case = Case(BRISK, Honest(0.02 * seconds, lambda i: sure), 150, timed=False)
    assert case.seconds < 1.2 * case.plain_seconds


def test_without_times_drafts_that_pay_are_made_in_nearly_all_rounds_of_the_first_answer():
    case = Case(BRISK, Honest(0.002, lambda i: 0.9), 100, timed=False)
    assert np.mean(drafted(case.rounds)) > 0.9


def test_plans_in_passes_become_seconds_but_for_their_drafts():
    known = BatchBudget(Honest(0.1, lambda i: 0.9), None).experience
    _, draft = known.arms
    draft.drafts.took(0.5)
    draft.planned = Average(0.5 + 2.0)
    known.retime(PassTimes((1, 96), (0.1, 0.1)))
    assert draft.planned.mean == pytest.approx(0.5 + 2.0 * 0.1)


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_round_that_was_planned_without_times_tells_nothing_once_there_are_some(
    meanwhile, monkeypatch
):
    case, told = Case(RISING, Honest(0.1, lambda i: 0.9), 4, timed=False), []
    budget, known = case.drafter, case.drafter.experience
    known.times.retime(None)
    _, state = case.start(8)
    (proposal,) = budget.propose([state], 96)
    monkeypatch.setattr(Experience, "spent", lambda *given: told.append(given))
    if meanwhile:
        known.retime(RISING)  # as another answer may have told
    state.last = replace(case.rounds[0].accepted, tree=proposal.tree)
    budget.propose([state], 96)
    assert len(told) == (not meanwhile)


SLOPED = PassTimes((1, 96), (1.0, 5.75))  # a twentieth more for each row


def take(times, rng, rows, pass_seconds, count):
    """Drafted rounds of so many rows, one in thirty of which waits for something else."""
    for _ in range(count):
        slower = float(np.exp(rng.normal(0, 0.08))) * (2.5 if rng.random() < 1 / 30 else 1.0)
        planned = 0.1 + float(times.of(rows))
        times.learn(rows, True, 0.1, (0.1 + pass_seconds) * slower, planned)


def test_a_size_does_not_get_cheaper_than_others_for_being_used_all_the_time():
    times, rng = RoundTimes(SLOPED), np.random.default_rng(1)
    take(times, rng, 32, float(SLOPED.of(32)), 400)
    share = float(times.of(32)) / float(times.of(8))
    assert share == pytest.approx(float(SLOPED.of(32) / SLOPED.of(8)), rel=0.1)


def test_without_times_sizes_that_were_not_tried_cost_what_the_others_let_expect():
    times, rng = RoundTimes(None), np.random.default_rng(1)
    times.learn(4, True, 0.1, 9.0, 1.4)
    times.learn(4, True, 0.1, 3.0, 1.4)  # waits for something else, and is the first that tells
    for rows in (4, 8, 4, 8):
        take(times, rng, rows, float(SLOPED.of(rows)), 12)
    for rows in (2, 16, 32):
        share = float(times.of(rows)) / float(times.of(8))
        assert share == pytest.approx(float(SLOPED.of(rows) / SLOPED.of(8)), rel=0.25)


def test_one_round_that_had_to_wait_makes_no_size_dearer():
    times = RoundTimes(SLOPED)
    for took in (3.0, 3.0):
        times.learn(8, True, 0.1, took, 0.1 + float(times.of(8)))
    assert float(times.of(16)) == pytest.approx(float(SLOPED.of(16)))
