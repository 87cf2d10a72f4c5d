"""Greedy answers with --exact are plain decoding's, on targets whose passes differ by width."""

from dataclasses import replace
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import Accepted, NearTies
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.exact import (
    SAFETY,
    Difference,
    Noise,
    first_difference,
    measure_noise,
    noise_of,
)
from dflash_mlx.engine.pair import Pair
from dflash_mlx.engine.state import State
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.block import Block
from support import decoding
from support.decoding import go_on, run, start, tokens_in, tree_of
from support.families import make_model
from support.hybrids import target_of
from support.rounding import (
    EXACT,
    FAMILIES,
    LOOSE,
    TOKENS,
    Rounding,
    counted,
    drafted_answer,
    plain_answer,
)
from support.toys import Letters, Scripted, foretold, prompt_of

SEEDS = range(3)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return Rounding(request.param, FAMILIES[request.param])


def assert_rows_are_those_of(state, target, prompt, rounds):
    """The state holds the keys, values and tokens of these rounds without a guard."""
    again = start(target, NoDraft(), prompt)
    again.begin(rounds[0])
    for accepted in rounds[1:]:
        ids = accepted.tree.ids(again.anchor)
        target.forward(ids, again.cache, Block.of(accepted.tree))
        again.commit(accepted, ids, None)
    assert (state.tokens, state.position) == (again.tokens, again.position)
    for a, b in zip(state.cache.arrays, again.cache.arrays, strict=True):
        assert mx.array_equal(a[..., : state.position, :], b[..., : state.position, :])


def test_answers_are_plain_decodings_with_the_guard_and_not_without(target):
    loose = checks = changed = 0
    for seed in SEEDS:
        plain = plain_answer(target, seed)
        loose += drafted_answer(target, seed, LOOSE)[0] == plain
        tokens, statistics = drafted_answer(target, seed, EXACT)
        assert tokens == plain
        checks += statistics.near_ties.checks
        changed += statistics.near_ties.changed
        assert statistics.rounds < TOKENS / 2
    assert loose < len(SEEDS)
    assert 0 < changed <= checks < len(SEEDS) * TOKENS


def test_one_row_passes_alone_are_not_enough_behind_a_cache_that_wide_passes_wrote():
    """Without replays the cache's own noise turns tokens."""
    target = Rounding("llama", 0.01)
    target.noise = Noise(measure_noise(target).wide, 0.0)
    answers = [drafted_answer(target, seed, EXACT) for seed in SEEDS]
    assert all(statistics.near_ties.passes > 0 for _, statistics in answers)
    assert all(statistics.near_ties.replays == 0 for _, statistics in answers)
    assert any(tokens != plain_answer(target, seed) for seed, (tokens, _) in enumerate(answers))


def test_the_noise_bounds_what_wide_passes_and_their_keys_and_values_do(target):
    noise = measure_noise(target)
    assert 0 < noise.cache <= noise.wide
    prompt, plain = prompt_of(2), plain_answer(target, 2)
    caches = [start(target, NoDraft(), prompt).cache for _ in range(2)]
    anchor = prompt[-1]
    for at in range(0, 24, 4):
        rows = mx.array([anchor, *plain[at : at + 3]])
        behind, _ = target.forward(rows[:1], caches[1].fork(), Block(1))
        wide, _ = target.forward(rows, caches[1], Block(4))
        caches[1].commit(range(4))
        narrow = []
        for row in range(4):
            narrow.append(target.forward(rows[row : row + 1], caches[0], Block(1))[0])
            caches[0].commit([0])
        off = wide - mx.concatenate(narrow)
        assert (off.max(axis=-1) - off.min(axis=-1)).max().item() < noise.wide
        off = behind - narrow[0]
        assert (off.max() - off.min()).item() < noise.cache
        anchor = plain[at + 3]


def test_the_noise_is_measured_once_per_target_and_grows_with_the_rounding():
    none, small, large = (Rounding("llama", size) for size in (0.0, 0.001, 0.01))
    assert noise_of(none).wide < 1e-4
    tokens, statistics = drafted_answer(none, 0, EXACT)
    assert tokens == plain_answer(none, 0) and statistics.near_ties.checks == 0
    assert 4 < noise_of(large).wide / noise_of(small).wide < 25
    assert SAFETY >= 2
    first, passes = noise_of(large), len(large.rows)
    assert noise_of(large) is first
    assert len(large.rows) == passes and large.rows.count(1) < 60


@pytest.mark.parametrize("method", ["none", "dflash"])
def test_rounds_without_drafts_are_plain_decodings_until_the_first_wide_pass(target, method):
    noise_of(target)
    plain = plain_answer(target, 1)
    drafter = NoDraft() if method == "none" else Scripted(lambda tokens, remaining: ([], []))
    state, before = start(target, drafter, prompt_of(1)), len(target.rows)
    tokens, statistics = counted(target, drafter, state, replace(EXACT, method=method))
    assert tokens == plain
    assert statistics.near_ties == (None if method == "none" else NearTies())
    assert target.rows[before:] == [1] * (TOKENS - 1)


def test_a_lone_root_behind_wide_rows_is_checked_too(target):
    """Drafts in the first rounds only: later passes have one row, but noisy rows before it."""
    checks = 0
    for seed in SEEDS:
        plain = plain_answer(target, seed)

        def script(tokens, remaining, plain=plain):
            ahead = plain[len(tokens) - 20 :][:4] if len(tokens) < 36 else []
            return ahead, list(range(len(ahead)))

        drafter = Scripted(script)
        state = start(target, drafter, prompt_of(seed))
        rounds = list(decoding.rounds(target, drafter, state, EXACT))
        checks += sum(r.near_ties.checks for r in rounds if len(r.tree) == 1)
        assert tokens_in(rounds) == plain
    assert checks > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"logit_bias": tuple((token, 0.3 * (token % 5)) for token in range(97))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_penalties_and_bias_are_part_of_the_choice(target, settings):
    sampling = SamplingConfig(**settings)
    config = DecodeConfig(max_tokens=40, sampling=sampling)
    prompt = prompt_of(0)
    plain = decoding.answer(target, NoDraft(), prompt, config)
    assert plain != plain_answer(target, 0)[:40]
    drafter = foretold(prompt, plain)
    assert decoding.answer(target, drafter, prompt, replace(config, exact=True)) == plain


def test_the_checks_write_nothing_into_the_state(target):
    """Rows, lengths and anchor are those of the same rounds without a guard."""
    target.noise = Noise(1e9, 1e9)  # every node is a near-tie
    state = start(target, NoDraft(), prompt_of(2))
    drafter = foretold(prompt_of(2), plain_answer(target, 2), 3)
    first, *rounds = islice(decoding.rounds(target, drafter, state, EXACT), 4)
    target.noise = None
    assert first.near_ties == NearTies(), "plain decoding's own, from the same pass"
    assert all(accepted.near_ties.checks == len(accepted.tokens) for accepted in rounds)
    assert_rows_are_those_of(state, target, prompt_of(2), [first, *rounds])


def test_an_answer_abandoned_after_a_near_tie_can_be_continued(target):
    """With the answer that plain decoding gives behind the same cache."""
    drafter = foretold(prompt_of(0), plain_answer(target, 0))
    state = start(target, drafter, prompt_of(0))
    said = []
    for accepted in decoding.rounds(target, drafter, state, EXACT):
        said += accepted.tokens
        if accepted.near_ties.checks:
            break
    assert 0 < len(said) < TOKENS
    more = prompt_of(0) + said + prompt_of(5, 4)
    assert go_on(target, drafter, state, more) == 20 + len(said) - 1
    other = State(state.cache.fork(), NoDraft().new_context())
    other.opening = state.opening
    expected = run(target, NoDraft(), other, LOOSE)
    assert run(target, foretold(more, expected), state, EXACT) == expected


def test_an_interrupt_inside_a_check_leaves_the_cache_as_it_was(target, monkeypatch):
    prompt = prompt_of(1)
    drafter = foretold(prompt, plain_answer(target, 1), 1)
    state = start(target, drafter, prompt)
    target.noise = Noise(1e9, 1e9)
    rounds = decoding.rounds(target, drafter, state, EXACT)
    whole = [next(rounds), next(rounds)]
    forward = target.forward

    def interrupted(tokens, cache, block, *more):
        if block.rows == 1:
            raise KeyboardInterrupt
        return forward(tokens, cache, block, *more)

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(rounds)
    monkeypatch.undo()
    target.noise = None
    assert_rows_are_those_of(state, target, prompt, whole)


def test_statistics_add_up_the_checks_and_say_so_in_json():
    statistics = Statistics("dflash")
    assert statistics.as_dict()["guard_checks"] == 0
    for near_ties in (NearTies(2, 3, 1, 1, 0.5), NearTies(), NearTies(1, 1, 0, 0, 0.25)):
        statistics.add_round(Accepted(tree_of([1], [-1]), (0,), 5, near_ties))
    found = statistics.as_dict()
    counts = [found[f"guard_{k}"] for k in ("checks", "passes", "replays", "changed", "seconds")]
    assert counts == [3, 4, 1, 1, 0.75]


def test_every_turn_of_a_conversation_equals_plain_decoding_from_scratch():
    """Rows that earlier answers left behind came from passes over several rows."""
    target = Rounding("llama", FAMILIES["llama"])
    repeats = prompt_of(5, 12) * 2
    plain_config = DecodeConfig(method="none", max_tokens=24)
    exact_config = DecodeConfig(method="ngram", exact=True, max_tokens=24)
    pair = Pair(target, Letters())
    session, prompt = Session(pair, exact_config), repeats
    for _ in range(3):
        plain = collect(Session(pair, plain_config).stream(prompt)).tokens
        assert collect(session.stream(prompt)).tokens == plain
        prompt = [*prompt, *plain, *repeats]
    first = collect(Session(pair, replace(exact_config, max_tokens=1)).stream(prompt))
    assert first.statistics.near_ties == NearTies(), "they were looked for"


# Where answers first differ, and the margins that explain it.

ASKED = [5, 9, 30, 41, 7]
SAID = [10, 11, 12, 13]


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_difference_has_its_position_and_the_margin_of_the_logits_there(at):
    target, other = target_of("llama"), [*SAID]
    other[at:] = [60 + i for i in range(4 - at)]
    found = first_difference(target, ASKED, SAID, other)
    logits = np.array(make_model("llama")(mx.array([ASKED + SAID[:at]]))[0, -1])
    margin = abs(logits[SAID[at]] - logits[other[at]])
    assert margin > 0.05
    assert found.position == at
    assert found.margin == pytest.approx(margin, abs=1e-4)
    assert first_difference(target, ASKED, SAID, other) == found, "looking changes nothing"
    assert first_difference(target, ASKED, SAID, list(SAID)) is None


@pytest.mark.parametrize("other", [SAID[:2], [], [*SAID, 14]], ids=["shorter", "none", "longer"])
def test_an_answer_of_another_length_differs_where_the_shorter_one_ends(other):
    target, expected = target_of("llama"), Difference(min(4, len(other)), None)
    assert first_difference(target, ASKED, SAID, other) == expected
    assert first_difference(target, ASKED, other, SAID) == expected
    assert not expected.is_near_tie
