"""Every round is spent on what gives most tokens per second, and the answer stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflash_mlx.core.accept import Accepted
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.drafters import adaptive
from dflash_mlx.drafters.adaptive import Adaptive, Arm, Scope, within_budget
from dflash_mlx.drafters.growth.grow import rejection_boundaries
from dflash_mlx.drafters.growth.reliability import never, reach, worth_keeping
from dflash_mlx.drafters.none import NoContext, NoDraft
from dflash_mlx.drafters.two_pass import FirstDraft, TwoPass
from dflash_mlx.engine.decode import answer as answer_of
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.target import pass_times
from dflash_mlx.target.model import Target
from dflash_mlx.target.pass_times import PassTimes
from support import decoding
from support.families import make_model
from support.toys import ToyTarget

VOCABULARY = 14
FLAT = PassTimes((1, 96), (1.0, 1.0))
STEEP = PassTimes((1, 2, 3, 4, 5, 96), (1.0, 1.05, 1.1, 1.15, 2.0, 90.0))
RISING = PassTimes((1, 16, 96), (1.0, 1.6, 9.0))


@dataclass
class Clock:
    """Time that passes only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTarget(ToyTarget):
    """A toy target whose passes take what `times` says, and `more`."""

    def __init__(self, clock: Clock, times: PassTimes, more: float = 0.0) -> None:
        super().__init__(VOCABULARY, context_length=2000)
        self.clock, self.times, self.more = clock, times, more

    def forward(self, tokens, cache, block, taps=()):
        self.clock.now += float(self.times.of(block.rows)) + self.more
        if block.tree is not None:
            self.clock.now += float(self.times.branching(np.array([block.rows]))[0])
        return super().forward(tokens, cache, block, taps)


class Honest(EachAlone):
    """Knows the next token with probability `sure(position)`, says so, and offers siblings.

    Its clock, its name and the answer that it knows come from the case that it is in.
    """

    name, taps, rounds_ahead = "draft", (), 0

    def __init__(self, seconds: float, sure: Callable[[int], float], width=1, seed=1) -> None:
        self.seconds, self.sure, self.width = seconds, sure, width
        self.rng = np.random.default_rng(seed)

    def new_context(self) -> NoContext:
        return NoContext()

    def draft(self, state: State, room: int) -> Proposal:
        self.clock.now += self.seconds
        done = len(state.tokens) - 3
        tokens, parents, logprobs, parent = [], [-1], [0.0], 0
        for i in range(done, min(done + 7, len(self.plain), done + room - 1)):
            right, first = self.plain[i], len(parents)
            guesses = [(right + k) % VOCABULARY for k in range(self.width)]
            if self.rng.random() > self.sure(i):
                guesses = [(guess + 5) % VOCABULARY for guess in guesses]
            guesses = self.rng.permutation(guesses).tolist()
            tokens += guesses
            parents += [parent] * self.width
            logprobs += [float(np.log(max(self.sure(i), 1e-3) / self.width))] * self.width
            parent = first + (guesses.index(right) if right in guesses else 0)
        return Proposal(Tree(tuple(tokens), tuple(parents), tuple(logprobs)))


class Unlucky(Honest):
    """As honest, but its first drafts are wrong, whatever they promise."""

    def __init__(self, seconds, sure, wrong, seed=1):
        super().__init__(seconds, sure, seed=seed)
        self.wrong = wrong

    def draft(self, state: State, room: int) -> Proposal:
        proposal, self.wrong = super().draft(state, room), self.wrong - 1
        if self.wrong < 0:
            return proposal
        drafts = tuple((token + 5) % VOCABULARY for token in proposal.tree.drafted)
        return Proposal(replace(proposal.tree, drafts=drafts))


class InTwo(TwoPass):
    """Two drafters one after the other: the second knows more where the first is not sure.

    asked: branches of every second pass.
    """

    taps, rounds_ahead = (), 0

    def __init__(self, first: Honest, second: Honest, by_branch: float = 0.0) -> None:
        self.passes = first, second
        self.by_branch, self.begun, self.asked = by_branch, 0, []

    def new_context(self) -> NoContext:
        return NoContext()

    def begin(self, states, rooms):
        self.begun += 1
        trees = [self.passes[0].draft(*each).tree for each in zip(states, rooms, strict=True)]
        return [FirstDraft(tree, branches=boundaries(tree)) for tree in trees]

    def go_on(self, states, drafts, counts):
        self.asked.append(sum(counts))
        self.passes[1].clock.now += self.by_branch * sum(counts)
        return [self.passes[1].draft(state, state.room) for state in states]


def boundaries(tree):
    """As of the published tree, of a chain."""
    sure = np.exp(np.array(tree.logprobs[1:]))
    return {tree.drafted[:i]: r for i, r in enumerate(rejection_boundaries(sure).tolist())}


class Case:
    """Plain decoding and a choice of drafters on one toy target, in simulated time."""

    def __init__(self, target, drafters, tokens=400, looks_up=False, chains=False, second=None):
        self.target, self.clock = target, target.clock
        self.plain = decoding.answer(target, NoDraft(), [1, 2, 3], DecodeConfig(max_tokens=tokens))
        self.plain_seconds = self.clock.now
        for name, drafter in drafters.items():
            drafter.name = name
            for part in getattr(drafter, "passes", [drafter]):
                part.plain, part.clock = self.plain, self.clock
        last = list(drafters.values())[-1]
        self.drafter = Adaptive(
            last, drafters, target.times, Scope((), looks_up, chains), self.clock
        )
        self.drafter.experience.second.times.timed = second
        self.rounds = self.run(tokens)
        self.seconds = self.clock.now - self.plain_seconds

    def run(self, tokens):
        """The rounds of another answer, which is plain decoding's."""
        config = DecodeConfig(max_tokens=tokens)
        rounds = list(answer_of(self.target, self.drafter, [1, 2, 3], config))
        assert decoding.tokens_in(r.accepted for r in rounds) == self.plain[:tokens]
        _, *chosen = rounds
        assert all(r.proposal.mode and r.proposal.reason for r in chosen)
        return chosen

    def start(self, tokens):
        """A config of so many tokens, and a state behind the prompt."""
        config = DecodeConfig(max_tokens=tokens)
        return config, decoding.start(self.target, self.drafter, [1, 2, 3], config)

    @property
    def modes(self):
        """The share of each mode in the second half, when all is known."""
        half = self.rounds[len(self.rounds) // 2 :]
        counts = Counter(r.proposal.mode for r in half)
        return {mode: count / len(half) for mode, count in counts.items()}


def case_of(times, *drafter, tokens=400):
    """A case with one drafter."""
    return Case(TimedTarget(Clock(), times), {"draft": Honest(*drafter)}, tokens)


def drafted(rounds):
    """Of each round, whether anything was drafted."""
    return [len(r.proposal.tree) > 1 for r in rounds]


@pytest.mark.parametrize(
    ("mode", "times", "drafter"),
    [
        ("plain", RISING, (0.3, lambda i: 0.05)),
        ("plain", RISING, (8.0, lambda i: 0.8)),
        ("chain", STEEP, (0.1, lambda i: 0.9)),
        ("tree", FLAT, (0.1, lambda i: 0.9, 3)),
    ],
    ids=["wrong drafts", "right but slow drafts", "width costs much", "width is free"],
)
def test_the_mode_is_the_one_that_pays(mode, times, drafter):
    case = case_of(times, *drafter)
    assert case.modes.get(mode, 0) > 0.8
    assert case.seconds < 1.05 * case.plain_seconds


@pytest.mark.parametrize(
    ("times", "seconds", "sure", "mode", "least"),
    [
        (FLAT, 0.1, 0.9, "chain", 2.5),
        (STEEP, 0.1, 0.9, "chain", 2.2),
        (RISING, 0.5, 0.6, "chain", 1.1),
        (RISING, 0.5, 0.1, "plain", 0.97),
    ],
)
def test_where_only_chains_are_verified_their_length_is_what_pays(
    times, seconds, sure, mode, least
):
    """Drafts offer siblings; none of them is verified, and the speed is that of the best length."""
    drafters = {"draft": Honest(seconds, lambda i: sure, 2)}
    case = Case(TimedTarget(Clock(), times), drafters, chains=True)
    assert all(r.proposal.tree.is_chain for r in case.rounds)
    assert case.modes[mode] > 0.8
    assert case.plain_seconds / case.seconds > least


@pytest.mark.parametrize(("mode", "dearer", "least"), [("tree", 1.2, 2.5), ("chain", 4.0, 1.3)])
def test_where_branches_make_a_pass_dearer_they_are_drafted_only_where_they_pay(
    mode, dearer, least
):
    """As on recurrent targets: one of two siblings is right, nine times in ten."""
    trees = PassTimes((1, 2, 96), (1.0, dearer, dearer))
    target = TimedTarget(Clock(), replace(FLAT, trees=trees))
    case = Case(target, {"draft": Honest(0.1, lambda i: 0.9, 2)})
    assert case.modes[mode] > 0.8
    assert case.plain_seconds / case.seconds > least


def test_of_a_lookup_and_a_draft_that_disagree_a_chain_follows_the_likelier():
    tree = Tree((5, 6, 7), (-1, 0, 1, 2), (0.0, -0.1, -0.1, -3.0), ("", *["draft"] * 3))
    merged = tree.merge([5, 8, 9], [-0.3, -2.0, -0.1], "lookup")
    reached = reach(merged, np.exp(merged.logprobs))
    kept, _ = worth_keeping(merged, reached, FLAT.of, 0.1, 96, never)
    assert merged.prune(kept).drafted == (5, 6, 7)
    kept, _ = worth_keeping(merged, reached, STEEP.of, 0.1, 3, never)
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
        unlucky = {"draft": Unlucky(0.4, uneven, wrong, seed)}
        case = Case(TimedTarget(Clock(), RISING), unlucky, 150)
        shares.append(np.mean(drafted(case.rounds)))
        seconds += case.seconds
    assert np.mean(shares) > mean
    assert seconds / (16 * 150) < 0.88, "seconds per token; plain decoding takes 1"


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_a_drafter_that_is_sure_and_always_wrong_is_soon_given_up(seconds):
    wrong = Unlucky(seconds, lambda i: 0.9, wrong=1000)
    case = Case(TimedTarget(Clock(), RISING), {"draft": wrong}, 1000)
    assert case.seconds < 1.03 * 1000


def test_the_second_draft_is_made_where_it_pays_and_only_there():
    worth = {"first": Honest(0.1, lambda i: 0.3), "both": Honest(0.3, lambda i: 0.95)}
    case = Case(TimedTarget(Clock(), FLAT), worth)
    assert "both" in case.rounds[-1].proposal.reason.split(":")[1][:30]
    useless = {"first": Honest(0.1, lambda i: 0.8), "both": Honest(2.0, lambda i: 0.85)}
    case = Case(TimedTarget(Clock(), FLAT), useless)
    chosen = Counter(r.proposal.reason.split(":")[-1].split()[0] for r in case.rounds[50:])
    assert chosen.most_common(1)[0][0] == "first"


def in_two(first, second, seconds, tokens=600, by_branch=0.0):
    """A case with a second pass of so many seconds, and whether each round went on to it."""
    drafter = InTwo(Honest(0.1, first), Honest(seconds, second, seed=2), by_branch)
    timed = PassTimes((1, 7), tuple(max(seconds + by_branch * n, 1e-6) for n in (1, 7)))
    case = Case(TimedTarget(Clock(), FLAT), {"draft": drafter}, tokens, second=timed)
    continued = np.array([r.proposal.why.continued for r in case.rounds])
    assert case.modes.get("plain", 0) < 0.1
    assert drafter.begun >= len(drafter.asked) == continued.sum(), "no pass is made twice"
    assert drafter.begun <= len(case.rounds)
    return case, continued


def begins(rounds):
    """The position in the answer at which each round's drafts begin."""
    return np.cumsum([1, *(len(r.accepted.tokens) for r in rounds[:-1])])


def by_stretch(position: int) -> float:
    """Sure in every other stretch of 40 tokens."""
    return 0.95 if position // 40 % 2 else 0.15


def test_a_second_pass_is_made_in_the_rounds_that_need_it():
    case, continued = in_two(by_stretch, lambda i: 0.9, 0.5)
    starts = begins(case.rounds)
    here, ahead = (np.array([by_stretch(i + k) > 0.5 for i in starts]) for k in (0, 6))
    late = starts > 200
    assert continued[late & ~here].mean() > 0.8 and continued[late & here & ahead].mean() < 0.2
    always, never = (
        Case(TimedTarget(Clock(), FLAT), {"draft": Honest(seconds, sure)}, 600).seconds
        for seconds, sure in ((0.6, lambda i: max(0.9, by_stretch(i))), (0.1, by_stretch))
    )
    assert case.seconds < 0.95 * min(always, never)


@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_a_second_pass_that_costs_too_much_is_hardly_ever_made(seconds):
    case, continued = in_two(lambda i: 0.6, lambda i: 0.9, seconds)
    alone = Case(TimedTarget(Clock(), FLAT), {"draft": Honest(0.1, lambda i: 0.6)}, 600)
    assert continued.mean() < 0.03
    assert case.seconds < 1.1 * alone.seconds


def test_a_second_pass_that_costs_nothing_is_made_wherever_it_may_help():
    _, continued = in_two(lambda i: 0.5, lambda i: 0.9, 0.0)
    assert continued.mean() > 0.95


def test_no_more_branches_are_asked_for_than_are_worth_their_time():
    """r = 0.4, 0.24, 0.14, ...: what each brings is worth that share of about two tokens."""
    case, _ = in_two(lambda i: 0.6, lambda i: 0.95, 0.1, by_branch=0.15)
    asked = case.drafter._drafters["draft"].asked
    assert 1 < np.mean(asked[20:]) < 6


def test_a_second_pass_that_begins_to_help_is_noticed_and_costs_little_before():
    case, continued = in_two(lambda i: 0.3, lambda i: 0.9 if i > 900 else 0.3, 0.3, 1800)
    starts = begins(case.rounds)
    before = (starts > 100) & (starts < 900)
    assert 0 < continued[before].mean() < 0.1
    assert continued[starts > 1400].mean() > 0.8


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
    case.drafter._drafters["draft"].sure = lambda position: 0.9
    rounds = case.run(60)
    assert "draft is tried again" in rounds[0].proposal.reason
    assert sum(drafted(rounds[:12])) > 6


def test_parked_rounds_run_ahead_of_the_reader_and_others_do_not():
    assert case_of(RISING, 0.5, lambda i: 0.03).drafter.rounds_ahead == 1
    assert case_of(FLAT, 0.1, lambda i: 0.9).drafter.rounds_ahead == 0


def test_what_one_session_learned_the_next_one_knows():
    case = case_of(RISING, 0.5, lambda i: 0.03)
    experience, drafters = case.drafter.experience, case.drafter._drafters
    (last,) = drafters.values()
    case.drafter = Adaptive(last, drafters, RISING, Scope(looks_up=False), case.clock)
    case.drafter.experience = experience
    assert sum(drafted(case.run(30))) <= 2


def test_lookups_join_plain_rounds_and_drafts_at_no_cost():
    target = TimedTarget(Clock(), FLAT)
    target.table[:] = 0.0
    for token in range(VOCABULARY):  # an answer that repeats itself
        target.table[:, token, (token + 1) % VOCABULARY] = 5.0
    case = Case(target, {"draft": Honest(5.0, lambda i: 0.01)}, 300, looks_up=True)
    assert case.seconds < 100, "far less than the 300 passes of plain decoding"
    assert "lookup" in {source for r in case.rounds for source in r.proposal.tree.sources}


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
    machine = case.drafter.experience.machine.mean
    config, state = case.start(20)
    for _ in decoding.rounds(case.target, case.drafter, state, config):
        case.clock.now += 500.0
        state.paused += 500.0  # as the loop has it
    assert case.drafter.experience.machine.mean == pytest.approx(machine, rel=0.01)


@pytest.mark.parametrize(("slow", "drafted", "wrong"), [(2.0, 1.0, True), (2.0, 1.9, False)])
def test_times_that_plain_and_drafted_rounds_contradict_are_measured_again_once(
    monkeypatch, tmp_path, slow, drafted, wrong
):
    """Not where all rounds are slower alike, as on a busy machine."""
    target, measured = Target(make_model("llama"), 200, "tiny"), []
    monkeypatch.setattr(pass_times, "_folder", lambda: tmp_path)
    monkeypatch.setattr(pass_times, "measure", lambda target: measured.append(1) or FLAT)
    monkeypatch.setattr(adaptive, "stored_times", pass_times.stored_times)
    pair, config = Pair(target, None), DecodeConfig("ngram")
    for times in (1, 1 + wrong, 1 + wrong):
        drafter = within_budget(NoDraft(), {}, pair, config, ())
        plain, other = drafter.experience.arms[0], Arm("draft", 2.0, 1.0)
        drafter.experience.arms = [plain, other]
        for arm, factor in ((plain, slow), (other, drafted)):
            for _ in range(60):
                arm.bias.add(factor)
                arm.rounds += 1
        assert len(measured) == times


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

    case = Case(TimedTarget(Clock(), RISING, more=10.0), {"draft": Honest(0.3, lambda i: 0.7)}, 300)
    assert case.seconds < 0.65 * 300 * 11
    assert np.mean([len(r.proposal.tree) for r in case.rounds[30:]]) > 5


def test_drafts_are_timed_before_the_first_round():
    """The first guess at a round is its draft's time and a pass over eight rows."""

    clock, made = Clock(), {"a": Honest(0.25, float), "b": Honest(2.0, float)}
    for drafter in made.values():
        drafter.clock, drafter.plain = clock, [0] * 9
    target = Target(make_model("llama"), 200, "tiny")
    drafter = Adaptive(made["b"], made, RISING, clock=clock)
    drafter.time_drafts(target)
    plain, *drafted = drafter.experience.arms
    assert plain.seconds == pytest.approx(1.0)
    assert [arm.drafts.of(0) for arm in drafted] == pytest.approx([0.25, 2.0])
    pass_seconds = float(RISING.of(8))
    assert [arm.seconds - pass_seconds for arm in drafted] == pytest.approx([0.25, 2.0])
