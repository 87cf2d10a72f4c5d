"""Drafts from a part of the vocabulary: its numbers, its words, and where its tokens come from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.networks import model as heads
from dflash_mlx.drafters.networks.model import ActiveVocabulary, PartialHead
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.read import LIKELY_TOKENS, draft_size, likely_tokens, unread_arguments
from dflash_mlx.session.session import Session
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support.families import VOCAB_SIZE, make_model
from support.models import write_drafter, write_model
from support.toys import prompt_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return str(write_model(root / "model")), str(write_drafter(root / "drafter"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2"])
@pytest.mark.parametrize("bits", [None, 4])
def test_rows_of_a_head_give_the_logits_of_their_tokens(family, bits):
    model = make_model(family)
    if bits is not None:
        nn.quantize(model, 32, bits)
    target, ids = Target(model, 100, family), np.array([40, 3, 9, 77])
    states = mx.random.normal((5, target.embedding()(mx.array([0])).shape[-1]))
    whole, part = target.head()(states), target.head_of(mx.array(ids))(states)
    assert mx.allclose(part, whole[:, mx.array(ids)], atol=1e-5)


def test_a_conversation_adds_its_own_words_and_each_conversation_only_its_own():
    target = Target(make_model("llama"), 100, "tiny")
    head = PartialHead(target, np.arange(VOCAB_SIZE), 20)
    words, others = ActiveVocabulary(head), ActiveVocabulary(head)
    states = mx.random.normal((3, 64))
    words.add(mx.array([5, 60, 61, 60]))
    logits, ids = words.complete(states, head.head(states))
    assert {60, 61} <= set(ids.tolist()) and len(set(ids.tolist())) == len(ids)
    assert len(ids) < 20 + 40 and logits.shape == (3, len(ids))
    assert mx.allclose(logits, target.head()(states)[:, mx.array(ids)], atol=1e-5)
    assert others.complete(states, head.head(states))[1].tolist() == list(range(20))


@pytest.mark.parametrize("method", ["dflash", "ddtree", "d2sd"])
def test_drafts_have_no_other_tokens_and_answers_stay_the_same(folders, method, monkeypatch):
    monkeypatch.setattr(heads, "_STEP", 1)
    config = DecodeConfig(method, max_tokens=30, lookup=False)
    answers, drafted = {}, {}
    for size in (97, 10):
        pair, prompt = load_pair(PairConfig(*folders, draft_vocabulary=size)), prompt_of(1)
        pair.target.pass_times = PassTimes((1, 96), (1.0, 1.0))  # everything is verified
        deltas = list(Session(pair, config).stream(prompt))
        answers[size] = [token for delta in deltas for token in delta.tokens]
        drafted[size] = {t for delta in deltas for t in delta.accepted.tree.drafted}
        likely = set(likely_tokens(Path(folders[1]), pair.tokenizer, 97)[:size].tolist())
        assert drafted[size] <= likely | {*prompt, *answers[size]}
    assert answers[10] == answers[97] and drafted[10] != drafted[97]


def tokenizer_of(*ends, template=None):
    return SimpleNamespace(eos_token_ids=set(ends), chat_template=template)


def test_frequent_tokens_come_first_then_ends_then_all_by_their_ids(tmp_path):
    assert likely_tokens(tmp_path, tokenizer_of(7, 99), 10).tolist()[:3] == [7, 0, 1]
    np.save(tmp_path / LIKELY_TOKENS, np.array([4, 2], np.uint16))
    found = likely_tokens(tmp_path, tokenizer_of(7), 10).tolist()
    assert found[:4] == [7, 4, 2, 0] and sorted(found) == list(range(10))


@pytest.mark.parametrize(
    "damage", [b"", b"no array", np.array([[1]]), np.array([10]), np.array([-1])]
)
def test_a_damaged_file_of_frequencies_is_refused_by_name(tmp_path, damage):
    if isinstance(damage, bytes):
        (tmp_path / LIKELY_TOKENS).write_bytes(damage)
    else:
        np.save(tmp_path / LIKELY_TOKENS, damage)
    with pytest.raises(DFlashError, match=LIKELY_TOKENS):
        likely_tokens(tmp_path, tokenizer_of(), 10)


def test_the_size_is_what_was_asked_for_or_a_quarter_of_a_large_vocabulary():
    assert [draft_size(None, v) for v in (97, 20_000, 49_152)] == [97, 8192, 12_288]
    assert draft_size(5, 97) == 5
    with pytest.raises(DFlashError, match="draft_vocabulary is 98, but the model has 97 tokens"):
        draft_size(98, 97)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_window": 7}, "draft_window is 7, below the drafter's block of 8"),
        ({"draft_vocabulary": 10**6}, "draft_vocabulary is 1000000"),
    ],
)
def test_what_does_not_fit_the_drafter_is_refused_before_it_is_read(folders, settings, words):
    with pytest.raises(DFlashError, match=words):
        load_pair(PairConfig(*folders, **settings))


THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        (THINKING, ["other"]),
        ("{{ messages[0].content }}", ["enable_thinking", "other"]),
        ({"default": THINKING, "tools": "{{ other }}"}, []),
        (None, ["enable_thinking", "other"]),
        ("{% if", []),
    ],
)
def test_arguments_that_a_template_does_not_read_are_found(template, unread):
    given = ["enable_thinking", "other"]
    assert unread_arguments(tokenizer_of(template=template), given) == unread
