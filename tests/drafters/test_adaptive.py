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
from dflash_mlx.drafters.adaptive import Adaptive
from dflash_mlx.drafters.none import NoContext, NoDraft
from dflash_mlx.engine.decode import answer as answer_of
from dflash_mlx.engine.drafter import EachAlone, Proposal
from dflash_mlx.engine.state import State
from dflash_mlx.target.model import Target
from dflash_mlx.target.pass_times import PassTimes
from support.decoding import go_on, start
from support.decoding import rounds as decode
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
    """A toy target whose passes take what `times` says."""

    def __init__(self, clock: Clock, times: PassTimes) -> None:
        super().__init__(VOCABULARY, context_length=2000)
        self.clock, self.times = clock, times

    def forward(self, tokens, cache, block, taps=()):
        self.clock.now += float(self.times.of(block.rows))
        return super().forward(tokens, cache, block, taps)


class Honest(EachAlone):
    """Knows the next token with probability `sure(position)`, says so, and offers siblings."""

    taps, rounds_ahead = (), 0

    def __init__(
        self,
        name: str,
        plain: list[int],
        seconds: float,
        sure: Callable[[int], float],
        clock: Clock,
        width: int = 1,
    ) -> None:
        self.name, self.plain, self.seconds = name, plain, seconds
        self.sure, self.clock, self.width = sure, clock, width
        self.rng = np.random.default_rng(1)

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

    def __init__(self, plain, seconds, sure, clock, wrong, seed=1):
        super().__init__("draft", plain, seconds, sure, clock)
        self.wrong, self.rng = wrong, np.random.default_rng(seed)

    def draft(self, state: State, room: int) -> Proposal:
        proposal, self.wrong = super().draft(state, room), self.wrong - 1
        if self.wrong < 0:
            return proposal
        drafts = tuple((token + 5) % VOCABULARY for token in proposal.tree.drafted)
        return Proposal(replace(proposal.tree, drafts=drafts))


@dataclass(frozen=True)
class Seen:
    """A round: what was proposed and why, and the tokens it brought."""

    tree: Tree
    tokens: tuple[int, ...]
    mode: str
    reason: str


def run(target, drafter, tokens):
    found = answer_of(target, drafter, [1, 2, 3], DecodeConfig(max_tokens=tokens))
    return [
        Seen(r.proposal.tree, r.accepted.tokens, r.proposal.mode, r.proposal.reason) for r in found
    ]


def answer(rounds):
    return [token for accepted in rounds for token in accepted.tokens]


class Case:
    """Plain decoding and a choice of drafters on one toy target, in simulated time."""

    def __init__(self, times, drafters, tokens=400):
        self.clock, self.times, self.tokens = Clock(), times, tokens
        self.target = TimedTarget(self.clock, times)
        self.plain = answer(run(self.target, NoDraft(), tokens))
        self.plain_seconds = tokens * float(times.of(1))
        made = {
            name: Honest(name, self.plain, seconds, sure, self.clock, width)
            for name, (seconds, sure, width) in drafters.items()
        }
        self.drafter = Adaptive(made, times, looks_up=False, clock=self.clock)
        start = self.clock.now
        self.rounds = run(self.target, self.drafter, tokens)
        self.seconds = self.clock.now - start

    @property
    def modes(self):
        """The share of each mode in the second half, when all is known."""
        half = self.rounds[len(self.rounds) // 2 :]
        counts = Counter(accepted.mode for accepted in half)
        return {mode: count / len(half) for mode, count in counts.items()}


CASES = {
    "drafts are wrong": ("plain", Case, RISING, {"draft": (0.3, lambda i: 0.05, 1)}),
    "drafts are right but slow": ("plain", Case, RISING, {"draft": (8.0, lambda i: 0.8, 1)}),
    "width costs much": ("chain", Case, STEEP, {"draft": (0.1, lambda i: 0.9, 1)}),
    "width is free": ("tree", Case, FLAT, {"draft": (0.1, lambda i: 0.9, 3)}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mode_is_the_one_that_pays(name):
    mode, make, *arguments = CASES[name]
    case = make(*arguments)
    assert answer(case.rounds) == case.plain
    assert case.modes.get(mode, 0) > 0.8
    assert case.seconds < 1.05 * case.plain_seconds


def test_drafts_that_never_pay_cost_little():
    case = Case(RISING, {"draft": (0.5, lambda i: 0.03, 1)}, tokens=1000)
    assert case.seconds < 1.03 * case.plain_seconds
    tried = [i for i, accepted in enumerate(case.rounds) if "trying" in accepted.reason]
    assert tried and tried[-1] > 500, "they are tried again all the same"


def uneven(position: int) -> float:
    return (0.2, 0.8, 0.5)[position % 3]


@pytest.mark.parametrize(
    ("wrong", "least", "mean"), [(1, 0.8, 0.9), (3, 0.3, 0.75)], ids=["one", "three"]
)
def test_drafts_that_pay_a_fifth_are_not_given_up_for_bad_luck(wrong, least, mean):
    """Eight sessions of 150 tokens, each with so many useless drafts at its beginning."""
    clock = Clock()
    target = TimedTarget(clock, RISING)
    plain = answer(run(target, NoDraft(), 150))
    shares, start = [], clock.now
    for seed in range(8):
        unlucky = Unlucky(plain, 0.4, uneven, clock, wrong, seed)
        rounds = run(target, Adaptive({"draft": unlucky}, RISING, (), False, clock), 150)
        assert answer(rounds) == plain
        shares.append(np.mean([len(accepted.tree) > 1 for accepted in rounds]))
    assert min(shares) > least
    assert np.mean(shares) > mean
    assert (clock.now - start) / (8 * 150) < 0.88, "seconds per token; plain decoding takes 1"


@pytest.mark.parametrize("seconds", [0.5, 1.0])
def test_a_drafter_that_is_sure_and_always_wrong_is_soon_given_up(seconds):
    clock = Clock()
    target = TimedTarget(clock, RISING)
    plain = answer(run(target, NoDraft(), 1000))
    wrong = Unlucky(plain, seconds, lambda i: 0.9, clock, wrong=1000)
    start = clock.now
    rounds = run(target, Adaptive({"draft": wrong}, RISING, (), False, clock), 1000)
    assert answer(rounds) == plain
    assert clock.now - start < 1.03 * 1000


def test_the_second_draft_is_made_where_it_pays_and_only_there():
    worth = {"first": (0.1, lambda i: 0.3, 1), "both": (0.3, lambda i: 0.95, 1)}
    assert "both" in Case(FLAT, worth).rounds[-1].reason.split(":")[1][:30]
    useless = {"first": (0.1, lambda i: 0.8, 1), "both": (2.0, lambda i: 0.85, 1)}
    case = Case(FLAT, useless)
    chosen = Counter(accepted.reason.split(":")[-1].split()[0] for accepted in case.rounds[50:])
    assert chosen.most_common(1)[0][0] == "first"


def test_it_notices_when_the_text_becomes_easy_and_when_it_becomes_hard():
    def easy_in_the_middle(position: int) -> float:
        return 0.9 if 300 <= position < 600 else 0.03

    case = Case(RISING, {"draft": (0.4, easy_in_the_middle, 1)}, tokens=900)
    position, drafted = 0, Counter()
    for accepted in case.rounds:
        drafted[position // 100] += len(accepted.tree) > 1
        position += len(accepted.tokens)
    plain_rounds = [100 - drafted[k] for k in (1, 2, 7, 8)]
    assert min(plain_rounds) > 85, "parked where drafts fail"
    assert drafted[4] + drafted[5] > 0.8 * sum(
        1 for start in starts(case.rounds) if 400 <= start < 600
    )
    assert answer(case.rounds) == case.plain


def test_an_easier_answer_is_noticed_at_its_beginning():
    case = Case(RISING, {"draft": (0.4, lambda i: 0.03, 1)})
    assert case.modes["plain"] > 0.9
    case.drafter._drafters["draft"].sure = lambda position: 0.9
    rounds = run(case.target, case.drafter, 60)
    assert answer(rounds) == case.plain[:60]
    assert "trying the draft" in rounds[0].reason
    assert sum(len(accepted.tree) > 1 for accepted in rounds[:12]) > 6


def starts(rounds):
    position = 0
    for accepted in rounds:
        yield position
        position += len(accepted.tokens)


def test_parked_rounds_run_ahead_of_the_reader_and_others_do_not():
    parked = Case(RISING, {"draft": (0.5, lambda i: 0.03, 1)})
    assert parked.drafter.rounds_ahead == 1
    busy = Case(FLAT, {"draft": (0.1, lambda i: 0.9, 1)})
    assert busy.drafter.rounds_ahead == 0


def test_every_round_says_how_and_why():
    case = Case(RISING, {"draft": (0.3, lambda i: 0.5, 1)})
    for accepted in case.rounds:
        tree = accepted.tree
        assert accepted.mode == ("plain" if len(tree) == 1 else "chain")
        assert accepted.reason


def test_what_one_session_learned_the_next_one_knows():
    case = Case(RISING, {"draft": (0.5, lambda i: 0.03, 1)})
    honest = Honest("draft", case.plain, 0.5, lambda i: 0.03, case.clock)
    fresh = Adaptive({"draft": honest}, RISING, looks_up=False, clock=case.clock)
    fresh.experience = case.drafter.experience
    rounds = run(case.target, fresh, 30)
    assert sum(len(accepted.tree) > 1 for accepted in rounds) <= 2
    assert answer(rounds) == case.plain[:30]


def test_lookups_join_plain_rounds_and_drafts_at_no_cost():
    clock = Clock()
    target = TimedTarget(clock, FLAT)
    target.table[:] = 0.0
    for token in range(VOCABULARY):  # an answer that repeats itself
        target.table[:, token, (token + 1) % VOCABULARY] = 5.0
    plain = answer(run(target, NoDraft(), 300))
    useless = Honest("draft", plain, 5.0, lambda i: 0.01, clock)
    start = clock.now
    rounds = run(target, Adaptive({"draft": useless}, FLAT, (), True, clock), 300)
    assert answer(rounds) == plain
    assert clock.now - start < 100, "far less than the 300 passes of plain decoding"
    sources = {source for accepted in rounds for source in accepted.tree.sources}
    assert "lookup" in sources


def test_an_answer_that_is_abandoned_teaches_nothing_wrong():
    case = Case(RISING, {"draft": (0.3, lambda i: 0.6, 1)})
    target, drafter = case.target, case.drafter
    config = DecodeConfig(max_tokens=50)
    state = start(target, drafter, [1, 2, 3], config)
    next(decode(target, drafter, state, config))
    case.clock.now += 1000.0  # the user thinks
    prompt = [*state.tokens, 4]
    go_on(target, drafter, state, prompt, config)
    for _ in decode(target, drafter, state, config):
        pass
    assert all(arm.seconds.mean < 3 for arm in drafter.experience.arms)


def test_rounds_that_wait_for_the_screen_do_not_count_in_full():
    case = Case(RISING, {"draft": (0.3, lambda i: 0.6, 1)})
    before = [arm.seconds.mean for arm in case.drafter.experience.arms]
    config = DecodeConfig(max_tokens=20)
    state = start(case.target, case.drafter, [1, 2, 3], config)
    for i, _ in enumerate(decode(case.target, case.drafter, state, config)):
        case.clock.now += 500.0 if i == 3 else 0.0
    after = [arm.seconds.mean for arm in case.drafter.experience.arms]
    assert after == pytest.approx(before, rel=0.3)


def test_a_changed_tree_is_not_taken_for_the_one_proposed():
    """Whoever replaces a proposal must not be learned from."""
    clock = Clock()
    target = TimedTarget(clock, RISING)
    for changed, learned in ((False, True), (True, False)):
        honest = Honest("draft", [5] * 50, 0.1, lambda i: 0.9, clock)
        drafter = Adaptive({"draft": honest}, RISING, (), False, clock)
        state = start(target, drafter, [1, 2, 3])
        state.end = state.position + 9
        tree = drafter.propose([state], 96)[0].tree
        assert len(tree) > 1
        state.last = Accepted(replace(tree) if changed else tree, (0,), 7)
        drafter.propose([state], 96)
        assert (drafter.experience.reliability.tried.sum() > 0) == learned


def test_passes_that_take_longer_than_measured_make_wider_trees_worth_it():
    """As behind a long context: what every pass costs more makes its rows cheaper by comparison."""

    class Slow(TimedTarget):
        def forward(self, tokens, cache, block, taps=()):
            self.clock.now += 10.0
            return super().forward(tokens, cache, block, taps)

    clock = Clock()
    target = Slow(clock, RISING)
    plain = answer(run(target, NoDraft(), 300))
    honest = Honest("draft", plain, 0.3, lambda i: 0.7, clock)
    drafter = Adaptive({"draft": honest}, RISING, (), False, clock)
    start = clock.now
    rounds = run(target, drafter, 300)
    assert clock.now - start < 0.65 * 300 * 11
    late = [len(accepted.tree) for accepted in rounds[30:]]
    assert np.mean(late) > 5


def test_drafts_are_timed_before_the_first_round():
    """The first guess at a round is its draft's time and a pass over eight rows."""

    class Timed(Honest):
        def draft(self, state, room):
            self.clock.now += self.seconds
            return Proposal(Tree.chain())

    clock = Clock()
    target = Target(make_model("llama"), 200, "tiny")
    made = {name: Timed(name, [], took, float, clock) for name, took in (("a", 0.25), ("b", 2.0))}
    drafter = Adaptive(made, RISING, clock=clock)
    drafter.time_drafts(target)
    plain, *drafted = drafter.experience.arms
    assert plain.seconds.mean == pytest.approx(1.0)
    assert [arm.draft_seconds for arm in drafted] == pytest.approx([0.25, 2.0])
    pass_seconds = float(RISING.of(8))
    assert [arm.seconds.mean - pass_seconds for arm in drafted] == pytest.approx([0.25, 2.0])
