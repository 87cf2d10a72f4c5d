"""Language models that draft: what mlx-lm alone says of each row, whatever was cut or kept before.

Kept prefixes, sequences together and grammars: with the other families, by `support.pairs`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.autoregressive import Chain, DrawnChain, GrownTree
from dflash_mlx.drafters.lm.model import LanguageModel
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.networks.model import MOST_WAITING
from dflash_mlx.drafters.networks.tokens import CHUNK
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.session import Session, collect
from dflash_mlx.verifier.model import Target
from support.configs import config_with
from support.decoding import path_to, run, start, state_with, tree_of
from support.families import FAMILIES, ONE_BY_ONE, POSITION_DEPENDENT, make_model
from support.family_configs import VOCAB_SIZE
from support.hybrids import plain_answer, target_of
from support.language_models import Alone, language_model
from support.recurrent_families import RECURRENT
from support.toys import Letters, prompt_of, random_tree

TOLERANCE = 1e-4
FEW = ["llama", "llama_sliding", "gemma3_text", "qwen3_5", "falcon_h1", "lfm2", "mamba2"]
pytestmark = pytest.mark.usefixtures("interpreted")


@cache
def model_of(name: str) -> LanguageModel:
    return language_model(name, target_of("llama"))


@cache
def alone(name: str) -> Alone:
    return Alone(name)


def after(name: str, tokens: list[int]) -> np.ndarray:
    """[V] for what follows, from mlx-lm alone."""
    one = alone(name)
    return one.one_by_one(tokens) if name in ONE_BY_ONE else one.after(tokens)


def context_of(name: str, tokens: list[int], *sizes: int) -> Any:
    """A context that took the tokens in, in parts of these lengths and the rest."""
    context, first = model_of(name).new_context(), 0
    for size in (*sizes, len(tokens) - sum(sizes)):
        context.append(mx.array(tokens[first : first + size]), None)
        first += size
    assert context.length == len(tokens)
    return context


def count_passes(monkeypatch: Any, model: LanguageModel, rows: list[int]) -> None:
    """Write down the rows of each pass of the model from now on."""
    forward = model.own.forward

    def counted(tokens: mx.array, *given: Any) -> Any:
        rows.append(tokens.size)
        return forward(tokens, *given)

    monkeypatch.setattr(model.own, "forward", counted)


def chain_error(name: str, context: Any, text: list[int], rows: int = 5) -> float:
    """By how much logits of a chain behind a context are off from mlx-lm's own, at most."""
    draft, path = model_of(name).begin(state_with(context)), prompt_of(len(text), rows)
    off = []
    for i, token in enumerate(path):
        found = np.array(draft.logits(mx.array([token]), [i - 1])[0])
        off.append(np.abs(found - after(name, [*text, *path[: i + 1]])).max())
    return float(max(off))


@pytest.mark.parametrize("name", [*FAMILIES, *RECURRENT])
def test_logits_of_a_chain_are_those_of_mlx_lm(name):
    """Behind more tokens than windows have, in passes of all sizes."""
    text = prompt_of(1, 45)
    assert chain_error(name, context_of(name, text, 3, 17, 1), text) < TOLERANCE


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("sizes", [(CHUNK + MOST_WAITING + 20,), (MOST_WAITING, 1, 30)])
def test_logits_are_the_same_however_the_text_came(name, sizes):
    text = prompt_of(2, sum(sizes) + 4)
    assert chain_error(name, context_of(name, text, *sizes), text, 3) < TOLERANCE


@pytest.mark.parametrize("name", [n for n in (*FAMILIES, *RECURRENT) if n not in ONE_BY_ONE])
def test_every_row_of_a_tree_says_what_a_fresh_pass_over_its_path_says(name):
    """Rows of each step behind rows of any step before."""
    model, text, rng = model_of(name), prompt_of(3, 30), np.random.default_rng(0)
    if not model.takes_trees:
        assert name in (*POSITION_DEPENDENT, "llama4_text", "bailing_hybrid")
        return
    tokens, parents = random_tree(rng, 12, VOCAB_SIZE)
    tree = tree_of([7, *tokens], [-1, *parents])
    context = context_of(name, text, 12)
    draft, row, found = model.begin(state_with(context)), 0, []
    while row < len(tree):
        rows = [row]
        while rows[-1] + 1 < len(tree) and tree.parents[rows[-1] + 1] < row and row:
            rows.append(rows[-1] + 1)
        ids = [[7, *tokens][i] for i in rows]
        found += [*np.array(draft.logits(mx.array(ids), [tree.parents[i] for i in rows]))]
        row += len(rows)
    for node, logits in enumerate(found):
        path = [[7, *tokens][i] for i in path_to(tree, node)]
        assert np.abs(logits - after(name, [*text, *path])).max() < TOLERANCE
    assert chain_error(name, context, text) < TOLERANCE, "nothing of it stays"


@pytest.mark.parametrize("name", FEW)
def test_a_draft_leaves_the_context_as_it_was_and_accepted_tokens_join_it(name):
    text, context = prompt_of(4, 70), None
    context = context_of(name, text[:50])
    for end in (50, 51, 54, 60, 70):
        context.append(mx.array(text[context.length : end]), None)
        for _ in range(2):
            assert chain_error(name, context, text[:end], 3) < TOLERANCE


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("length", [659, 590, 300, 0])
def test_a_context_that_was_cut_reads_again_what_it_has_to(name, length):
    text, more = prompt_of(5, 660), prompt_of(6, 9)
    context = context_of(name, text, 600, 20, 40)
    model_of(name).try_out(context)
    assert context.refill_from(length) == length, "the target does not have to"
    context.trim(length)
    assert context.length == length
    context.append(mx.array(more), None)
    assert chain_error(name, context, [*text[:length], *more], 3) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_no_more_is_read_again_than_there_is_no_way_back_to(name, monkeypatch):
    """Recurrent states are kept where parts of a prompt began."""
    context, passes = context_of(name, prompt_of(5, 1200), 1120, 80), []
    count_passes(monkeypatch, model_of(name), passes)
    context.trim(1000)
    assert passes == ([488] if name == "qwen3_5" else [])


@pytest.mark.parametrize("name", FEW)
def test_copies_go_on_by_themselves(name):
    text, first, second = prompt_of(7, 90), prompt_of(8, 600), prompt_of(9, 20)
    context = context_of(name, text, 80)
    other = context.fork()
    context.append(mx.array(second), None)
    other.append(mx.array(first), None)
    assert chain_error(name, other, [*text, *first], 1) < TOLERANCE
    assert chain_error(name, context, [*text, *second], 3) < TOLERANCE
    other.trim(300)
    assert chain_error(name, other, [*text, *first][:300], 1) < TOLERANCE


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("waiting", [0, 7])
def test_what_was_saved_goes_on_where_it_was(name, waiting):
    text = prompt_of(10, 100 + waiting)
    context = context_of(name, text, 100)
    restored = model_of(name).new_context()
    restored.restore(context.saved(), mx.array(text))
    assert restored.kind == context.kind and restored.length == len(text)
    assert chain_error(name, restored, text, 3) < TOLERANCE
    restored.trim(40)
    assert chain_error(name, restored, text[:40], 3) < TOLERANCE


def test_tokens_wait_until_a_draft_or_many_of_them_ask(monkeypatch):
    model, passes = model_of("llama"), []
    count_passes(monkeypatch, model, passes)
    context = context_of("llama", prompt_of(11, 60), *[1] * 59)
    assert passes == []
    model.begin(state_with(context)).logits(mx.array([5]), [-1])
    assert passes == [61], "the first row passes with what waited"
    context.append(mx.array(prompt_of(12, 1100)), None)
    assert passes == [61, 512, 512, 76]
    model.begin(state_with(context)).logits(mx.array([5]), [-1])
    assert passes[4:] == [1]


def test_a_recurrent_chain_passes_every_row_once_and_a_tree_all_rows_again(monkeypatch):
    model, passes = model_of("qwen3_5"), []
    count_passes(monkeypatch, model, passes)
    draft = model.begin(state_with(context_of("qwen3_5", prompt_of(13, 9))))
    for tokens, parents in (([5], [-1]), ([6], [0]), ([7], [1]), ([8, 9], [0, 2])):
        draft.logits(mx.array(tokens), parents)
    assert passes == [10, 1, 1, 5]


# Vocabularies


@pytest.mark.parametrize("size", [90, 97, 130])
def test_logits_are_over_the_targets_vocabulary(size):
    """A longer tail is cut, a shorter one never drafted; tokens of it are read as its last."""
    target = target_of("llama")
    model, one = language_model("qwen3", target, vocab_size=size), Alone("qwen3", vocab_size=size)
    text = [*prompt_of(14, 20), 96, 3]
    context = model.new_context()
    context.append(mx.array(text), None)
    draft = model.begin(state_with(context))
    for i, token in enumerate([5, 96]):
        found = np.array(draft.logits(mx.array([token]), [i - 1])[0])
        known = [min(t, size - 1) for t in [*text, 5, 96][: len(text) + i + 1]]
        expected = one.after(known)[:VOCAB_SIZE]
        assert found.shape == (VOCAB_SIZE,)
        assert np.abs(found[: len(expected)] - expected).max() < TOLERANCE
        assert np.all(found[len(expected) :] == -np.inf)
    assert mx.isfinite(model.try_out(model.new_context())).all()
    drafters = Chain(model), GrownTree(model, None, 3, 20)
    state = start(target, drafters[0], text)
    plain = plain_answer(target, text, 12)
    for drafter in drafters:
        state = start(target, drafter, text)
        assert run(target, drafter, state, DecodeConfig(max_tokens=12)) == plain


@pytest.mark.parametrize("size", [90, 97, 130])
def test_logits_that_overflow_are_seen_where_the_model_is_tried(monkeypatch, size):
    model = language_model("qwen3", target_of("llama"), vocab_size=size)
    forward = model.own.forward

    def overflown(*given: Any) -> Any:
        logits, features = forward(*given)
        return mx.where(mx.arange(size) == 5, -mx.inf, logits), features

    monkeypatch.setattr(model.own, "forward", overflown)
    assert not mx.isfinite(model.try_out(model.new_context())).all()


# Answers

PAIRS = [
    ("llama", "llama"), ("llama", "qwen3_5"), ("llama", "mamba2"), ("qwen3_5", "qwen3"),
    ("falcon_h1", "falcon_h1"), ("llama_sliding", "gemma3_text"), ("lfm2", "llama_sliding"),
    ("ministral3", "llama"), ("llama", "ministral3"), ("llama", "bailing_hybrid"),
]  # fmt: skip
USES = [{}, {"block_size": 4}, {"budget": 12}, {"budget": 12, "branches": 3}]
WARM = SamplingConfig(temperature=0.8, seed=3)


def pair_of(target: str, name: str, seed: int = 5) -> Pair:
    large = Target(make_model(target), 4096, target)
    model = language_model(name, large, seed)
    return Pair(large, Letters(), (model,), f"tiny {name}")


@pytest.mark.parametrize(("target", "name"), PAIRS)
def test_no_answer_is_changed(target, name):
    """Over turns of a conversation, whose windows wrap; greedy, and matched at a temperature."""
    pair = pair_of(target, name)
    for use in USES:
        if not pair.target.takes_trees and "budget" in use:
            continue
        if not pair.drafters[0].takes_trees and "branches" in use:
            continue
        for sampling in (SamplingConfig(), WARM):
            how = {"max_tokens": 14, "sampling": sampling}
            config = config_with("lm", **use, **how, acceptance="match")
            session, plain = Session(pair, config), Session(pair, DecodeConfig("none", **how))
            said = prompt_of(15, 90)
            for turn in range(2):
                expected = list(collect(plain.stream(said)).tokens)
                assert list(collect(session.stream(said)).tokens) == expected
                said = [*said, *expected, *prompt_of(turn, 9)]


def test_a_model_that_drafts_for_itself_is_always_right():
    for name in ("llama", "qwen3_5", "llama_sliding"):
        pair = pair_of(name, name, seed=0)
        for use in ({"block_size": 8}, {"budget": 8, "branches": 1}):
            config = config_with("lm", max_tokens=33, **use)
            statistics = collect(Session(pair, config).stream(prompt_of(16, 50))).statistics
            assert statistics.rounds == 4, "32 tokens behind the first, 8 a round"


def test_branches_of_a_model_that_drafts_chains_alone_are_refused():
    pair = pair_of("llama", "ministral3")
    with pytest.raises(DFlashError, match="branches is 4, but rows of this draft model follow one"):
        make_drafter(pair, config_with("lm", branches=4))
    make_drafter(pair, config_with("lm", branches=1))
    tree = make_drafter(pair, config_with("lm", budget=12))
    drafted = tree.draft(start(pair.target, tree, prompt_of(17, 20)), 20)  # no answer began
    assert drafted.tree.is_chain


@pytest.mark.parametrize(("name", "chain"), [("llama", False), ("qwen3_5", True)])
def test_recurrent_models_draft_chains_unless_they_are_asked_for_trees(name, chain):
    pair = pair_of("llama", name)
    for more, is_chain in (({}, chain), ({"branches": 3}, False)):
        drafter = make_drafter(pair, config_with("lm", budget=12, **more))
        state = start(pair.target, drafter, prompt_of(17, 20))
        state.anchor = mx.array([5])
        assert drafter.draft(state, 20).tree.is_chain == is_chain


def test_drawn_tokens_follow_the_law_that_is_handed_on():
    """q of every row is that of mlx-lm behind what was drawn before."""
    model, text = model_of("falcon_h1"), prompt_of(18, 30)
    drafter = DrawnChain(model, 5, WARM)
    state = start(target_of("llama"), drafter, text, DecodeConfig(max_tokens=9))
    state.anchor = state.opening = mx.array([7])
    proposal = drafter.draft(state, 5)
    drawn = [7, *proposal.tree.drafted]
    for row, q in enumerate(np.array(proposal.q)):
        logits = after("falcon_h1", [*text, *drawn[: row + 1]]) / WARM.temperature
        law = np.exp(logits - logits.max())
        assert np.abs(q - law / law.sum()).max() < TOLERANCE
