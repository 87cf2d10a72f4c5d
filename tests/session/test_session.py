"""The drafter's context stays in step with the target's cache, whatever happens to an answer.

Emitted tokens are the target's own, so a wrong context would show in none of them; it would only
be accepted less. So the contexts themselves are compared with fresh ones.
"""

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.statistics import Observer
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.model import Target
from support.drafter_formats import drafter_folder
from support.families import make_model
from support.toys import Letters, prompt_of

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.fixture(params=["llama", "gemma3_text"])
def target_name(request):
    return request.param


@pytest.fixture(params=[{}, SLIDING], ids=["full", "sliding"])
def pair(request, target_name, tmp_path):
    target = Target(make_model(target_name), 512, target_name)
    model = drafter_folder(tmp_path, [0, 1, 2], 1, target, **request.param)
    return Pair(target, Letters(), (model,), "tiny")


def assert_in_step(session):
    """The context has every committed token and drafts what a fresh one would."""
    state = session.state
    committed = state.tokens[: state.position]
    assert state.context.length == state.position == len(committed)
    fresh = Session(session.pair, session.config)
    anchor = 7
    next(fresh.stream([*committed, anchor], Observer()))
    fresh.state.trim(len(committed))
    for either in (state, fresh.state):
        either.anchor = mx.array([anchor])
    model = session.pair.drafters[0]
    ours = np.array(model.logits(state.context, state.anchor, 8))
    expected = np.array(model.logits(fresh.state.context, fresh.state.anchor, 8))
    assert np.abs(ours - expected).max() < 1e-4


@pytest.mark.parametrize("least", [1, 7])
def test_after_an_abandoned_answer_and_its_continuation(pair, least):
    session = Session(pair, DecodeConfig("dflash", max_tokens=30))
    prompt, said = prompt_of(0, 25), []
    for delta in session.stream(prompt):
        said += delta.tokens
        if len(said) >= least:
            break
    assert_in_step(session)
    list(session.stream(prompt + said + prompt_of(1, 9)))
    assert_in_step(session)


def test_after_a_stop_token_or_a_stop_text(pair):
    prompt = prompt_of(0, 25)
    whole = collect(Session(pair, DecodeConfig("dflash", max_tokens=30)).stream(prompt)).tokens
    text = pair.tokenizer.decode([whole[9]])
    stopped = Session(pair, DecodeConfig("dflash", max_tokens=30, stop=(text,)))
    list(stopped.stream(prompt))
    assert_in_step(stopped)
    pair.tokenizer.eos_token_ids = {whole[9]}
    ended = Session(pair, DecodeConfig("dflash", max_tokens=30))
    list(ended.stream(prompt))
    assert_in_step(ended)
    at = whole.index(whole[9])
    assert ended.state.position == stopped.state.position == len(prompt) + at


def test_after_a_whole_answer_and_an_edited_conversation(pair):
    session = Session(pair, DecodeConfig("dflash", max_tokens=12))
    prompt = prompt_of(0, 25)
    list(session.stream(prompt))
    assert session.state.position == 25 + 11
    assert_in_step(session)
    edited = [*prompt[:20], *prompt_of(2, 8)]
    (*_, last) = session.stream(edited)
    assert last.statistics.reused_tokens in (0, 20)
    assert_in_step(session)


def test_after_an_interrupt_inside_a_round(pair, monkeypatch):
    session = Session(pair, DecodeConfig("dflash", max_tokens=12))
    deltas = session.stream(prompt_of(0, 25))
    next(deltas)
    monkeypatch.setattr(type(session.state.context), "append", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(deltas)
    monkeypatch.undo()
    assert session.state.position == 0
    list(session.stream(prompt_of(0, 25)))
    assert_in_step(session)


def interrupt(*_):
    raise KeyboardInterrupt
