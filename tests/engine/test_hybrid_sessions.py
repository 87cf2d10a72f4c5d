"""Conversations with targets that have recurrent layers: turns, stops, edits, methods, training."""

import itertools
from dataclasses import replace
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BestFirst
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.methods import make_drafter, settle
from dflash_mlx.drafters.networks.layers import limit_windows
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.exact import first_difference, measure_noise
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from dflash_mlx.train.data import FeatureCache
from dflash_mlx.verifier import mixers, recurrent
from dflash_mlx.verifier.block import Block
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from dflash_mlx.verifier.recurrent import TAIL
from support import decoding
from support.configs import config_with
from support.decoding import go_on, start
from support.drafter_formats import drafter_folder
from support.families import VOCAB_SIZE, make_model
from support.hybrids import (
    difference,
    forward,
    oracle,
    plain_answer,
    rounds,
    run,
)
from support.law import VOCABULARY, ToyDrafter, chi_square
from support.recurrent_families import RECURRENT
from support.toys import Letters, foretold, prompt_of

FEW = ["falcon_h1", "lfm2", "qwen3_5"]
TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(scope="module", params=FEW)
def target(request):
    return Target(make_model(request.param), 1024, request.param)


@pytest.fixture
def pair(target, tmp_path):
    model = drafter_folder(tmp_path, [0, 1, 2], 1, target)
    return Pair(target, Letters(), (model,), "tiny")


def answer(session, prompt):
    return [token for delta in session.stream(prompt) for token in delta.tokens]


def assert_state_is_that_of_its_tokens(session):
    state = session.state
    committed = state.tokens[: state.position]
    assert difference(session.pair.target, state.cache, committed) < TOLERANCE


@pytest.mark.parametrize("method", ["none", "ngram", "dflash", "ddtree", "resample", "d2sd"])
def test_turns_of_a_session_equal_plain_decoding_from_the_beginning(pair, method):
    budget = 12 if method == "d2sd" else None
    session = Session(pair, config_with(method, budget=budget, max_tokens=12))
    said, held = prompt_of(0, 45), 0
    for turn in range(3):
        plain = plain_answer(pair.target, said, 12)
        *_, last = session.stream(said)
        assert last.statistics.reused_tokens == held
        assert session.state.tokens == said + plain[:-1]
        assert_state_is_that_of_its_tokens(session)
        held = session.state.position
        assert held == len(said) + 11
        said = said + plain + prompt_of(turn + 1, 9)
    assert session.state.context.length >= session.state.position


def test_a_stop_token_amid_a_round_leaves_the_state_of_what_was_said(target):
    prompt = prompt_of(2, 40)
    plain = plain_answer(target, prompt, 30)
    for stop in (1, 2, 3, 4, 9):
        drafter = oracle(prompt, plain, lambda: (4, 4))
        state = start(target, drafter, prompt)
        list(islice(rounds(target, drafter, state, 30), 2))
        end = len(prompt) + stop - 1
        state.trim(end)
        assert state.position == min(end, len(prompt) + 5)
        assert difference(target, state.cache, (prompt + plain)[: state.position]) < TOLERANCE
        more = (prompt + plain)[:end] + prompt_of(3, 4)
        held = state.position
        assert go_on(target, drafter, state, more) == held
        assert run(target, NoDraft(), state, 8) == plain_answer(target, more, 8)


def test_a_drafters_window_is_computed_again_where_the_target_can_go_back_that_far(pair):
    (whole,) = pair.drafters
    limited = BlockModel(
        whole.module,
        replace(whole.config, layer_windows=limit_windows(whole.config.layer_windows, 16)),
        pair.target,
    )
    pair = replace(pair, drafters=(limited,))
    session = Session(pair, DecodeConfig(method="dflash", max_tokens=8, prefill_step=100))
    prompt = prompt_of(14, 60)
    list(session.stream(prompt))
    list(session.stream(prompt + prompt_of(15, 400)))
    *_, last = session.stream(prompt)
    assert last.statistics.reused_tokens == 59 - 15
    assert session.state.tokens == prompt + plain_answer(pair.target, prompt, 8)[:-1]
    assert_state_is_that_of_its_tokens(session)


@pytest.mark.parametrize("method", ["none", "ngram", "dflash"])
def test_a_session_that_was_left_after_its_first_token_goes_on(pair, method):
    session, prompt = Session(pair, DecodeConfig(method=method, max_tokens=12)), prompt_of(16, 70)
    first = next(session.stream(prompt))
    for more in (prompt, [*prompt, *first.tokens, *prompt_of(17, 5)]):
        assert answer(session, more) == plain_answer(pair.target, more, 12)
        assert_state_is_that_of_its_tokens(session)


@pytest.mark.parametrize(("dropped", "reused"), [(0, 99), (3, 96), (20, 79), (TAIL, 67), (60, 0)])
def test_a_prompt_whose_end_is_left_out_of_the_next_turn_is_reused_up_to_there(
    target, dropped, reused
):
    """As chat templates do with the tag that begins a thought."""
    prompt = prompt_of(7, 100)
    config = DecodeConfig(prefill_step=40)
    state = start(target, NoDraft(), prompt, config)
    run(target, NoDraft(), state, 15)
    edited = [*prompt[: 99 - dropped], *((t + 1) % VOCAB_SIZE for t in prompt[99 - dropped :]), 5]
    assert go_on(target, NoDraft(), state, edited, config) == reused
    assert difference(target, state.cache, edited) < TOLERANCE


def test_the_prompt_before_the_last_one_can_be_gone_back_to(target):
    prompt = prompt_of(8, 50)
    state = start(target, NoDraft(), prompt)
    said = run(target, NoDraft(), state, 10)
    go_on(target, NoDraft(), state, prompt + said + prompt_of(9, 50))
    run(target, NoDraft(), state, 10)
    other = [*prompt, (said[0] + 1) % VOCAB_SIZE, 3, 1]
    assert go_on(target, NoDraft(), state, other) == len(prompt)
    assert run(target, NoDraft(), state, 10) == plain_answer(target, other, 10)


def test_branches_that_are_right_are_kept(target):
    prompt = prompt_of(19, 40)
    plain = plain_answer(target, prompt, 60)
    drafter = foretold(prompt, plain)
    state = start(target, drafter, prompt)
    made = list(rounds(target, drafter, state, 60))
    assert [token for accepted in made for token in accepted.tokens] == plain
    kept = [len(accepted.path) - 1 for accepted in made if not accepted.tree.is_chain]
    assert len(kept) > 5 and max(kept) > 3
    assert difference(target, state.cache, prompt + plain[:-1]) < TOLERANCE


def test_branches_are_refused_where_they_were_never_tried(tmp_path):
    target = Target(make_model("bailing_hybrid"), 1024, "bailing")
    pair = Pair(target, Letters(), (drafter_folder(tmp_path, [0], 1, target),), "tiny")
    assert settle(DecodeConfig(), pair.capabilities).method == "dflash"
    for method in ("ddtree", "resample", "d2sd"):
        with pytest.raises(DFlashError, match='bailing.*method="dflash" or method="ngram"'):
            Session(pair, DecodeConfig(method=method))


def test_auto_drafts_branches_for_a_recurrent_target_where_they_pay(pair):
    assert settle(DecodeConfig(), pair.capabilities).method == "ddtree"
    dear = PassTimes((1, 96), (1.0, 1.0), trees=PassTimes((1, 2, 96), (1.0, 9.0, 9.0)))
    prompt = prompt_of(20, 40)
    plain, shapes = plain_answer(pair.target, prompt, 24), []
    for times in (dear, replace(dear, trees=None)):
        pair.target.pass_times = times
        pair.learned.clear()
        drafter = make_drafter(pair, DecodeConfig(lookup=False))
        state = start(pair.target, drafter, prompt)
        made = list(rounds(pair.target, drafter, state, 24))
        assert [token for accepted in made for token in accepted.tokens] == plain
        shapes.append([a.tree.is_chain for a in made if len(a.tree) > 1])
    pair.target.pass_times = None
    assert all(shapes[0]) and not all(shapes[1])


@pytest.mark.parametrize(
    ("method", "every"),  # token is a near-tie
    [("dflash", False), ("ddtree", False), ("d2sd", False), ("ngram", True)],
)
def test_exact_answers_are_plain_decodings_and_probes_leave_the_state_alone(
    pair, monkeypatch, method, every
):
    """A near-tie is decided again behind its ancestors, then from the prompt, by one-row passes."""
    noise = measure_noise(pair.target)
    assert 0 < noise.cache <= noise.wide < 0.1
    monkeypatch.setattr(pair.target, "noise", type(noise)(1e9, 1e9) if every else noise)
    prompt = prompt_of(11, 20) * 2
    session = Session(pair, DecodeConfig(method=method, max_tokens=20, exact=True))
    plain = plain_answer(pair.target, prompt, 20)
    assert answer(session, prompt) == plain
    assert_state_is_that_of_its_tokens(session)
    assert first_difference(pair.target, prompt, plain, plain) is None
    wrong = [*plain[:5], (plain[5] + 1) % VOCAB_SIZE]
    assert first_difference(pair.target, prompt, plain, wrong).position == 5


def test_training_features_are_those_of_one_pass_over_the_sequence(target, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_mlx.train.data._CHUNK", 7)
    tokens, aux_layers = prompt_of(13, 30), (0, 2)
    cache = FeatureCache(tmp_path / "features", [tokens], target, aux_layers, 10**6)
    assert list(cache.fill()) == [30]
    target.tap(aux_layers)
    logits, features = target.forward(mx.array(tokens), target.new_cache(), Block(30), aux_layers)
    ours, scale = cache.features(0).astype(mx.float32), mx.abs(features).max()
    assert (mx.abs(ours - features).max() / scale).item() < 2**-7  # of bfloat16
    choices, p = cache.choices(0), mx.softmax(logits.astype(mx.float32), axis=-1)
    assert np.array_equal(choices["token"][:, 0], np.array(mx.argmax(logits, axis=-1)))
    largest = np.sort(np.array(p))[:, ::-1][:, : choices.shape[1]]
    assert np.allclose(choices["probability"], largest, rtol=1e-2)


def test_kernels_take_the_attention_of_every_family_that_leaves_it_to_mlx_lm():
    without = set()
    for name in sorted(RECURRENT):
        target = Target(make_model(name), 512, name)
        target.use_kernels("auto")
        reasons = [choice.reason for choice in target.kernels.choices.values()]
        without.update(name for reason in reasons if "computes the attention" in reason)
    assert without == {"plamo2"}


# Sampled answers follow the law of a target with recurrent layers when trees are drafted.


PROMPT, LENGTH, DRAWS = [0, 3, 2, 1, 3], 3, 400


def law_of(target, temperature):
    """The chance of every answer, from fresh passes."""
    law = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=LENGTH):
        logits = forward(target, target.new_cache(), [*PROMPT, *tokens[:-1]])[-LENGTH:]
        p = np.array(mx.softmax(logits / temperature, axis=-1))
        law[tokens] = float(np.prod([p[i, token] for i, token in enumerate(tokens)]))
    return law


def distance(target, temperature):
    """Of answers with drafted trees from the law, in standard deviations."""
    drafter, answers = BestFirst(ToyDrafter(1), None, 8), []
    for seed in range(DRAWS):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        config = DecodeConfig(max_tokens=LENGTH, sampling=sampling)
        answers.append(tuple(decoding.answer(target, drafter, PROMPT, config)))
    return chi_square(law_of(target, temperature), answers)


@pytest.fixture
def four_tokens(monkeypatch):
    sizes = {"vocab_size": VOCABULARY, "layer_types": ["conv", "conv", "full_attention"]}
    monkeypatch.setitem(RECURRENT, "lfm2", {**RECURRENT["lfm2"], **sizes})
    return Target(make_model("lfm2"), 64, "four tokens")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_answers_follow_the_law(four_tokens, temperature):
    assert abs(distance(four_tokens, temperature)) < 3.5


def test_mixers_that_follow_no_paths_break_the_law(four_tokens, monkeypatch):
    def as_a_chain(layer, paths, call):
        state = recurrent.RecurrentLayer(len(layer.cache), 0)
        state.cache = list(layer.cache)
        return call.changed(lambda arg: state if arg is mixers.STATE else arg)()

    monkeypatch.setattr(recurrent.RecurrentLayer, "along", as_a_chain)
    assert distance(four_tokens, 1.0) > 3.5
