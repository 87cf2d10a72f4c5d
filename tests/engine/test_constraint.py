"""What a grammar allows is a function of the tokens, and sampling under it keeps the law."""

from __future__ import annotations

import json
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.tree import Accepted, Tree
from dflash_mlx.drafters.block_diffusion import BestFirst, BlockDiffusion, DrawnBlock
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine import grammar as module
from dflash_mlx.engine.grammar import FORCED
from support.decoding import answer_rounds as rounds_of
from support.decoding import tree_of
from support.grammars import END, SCHEMA, constraint, tiny_tokenizer, toy_allowed, toy_constraint
from support.law import (
    PROMPT,
    VOCABULARY,
    ToyDrafter,
    answers_of,
    chi_square,
    conditional,
    enumerated_law,
)
from support.models import EOS
from support.rounding import EXACT, FAMILIES, LOOSE, Rounding
from support.toys import Scripted, ToyTarget, foretold, prompt_of, random_tree

SIZE = 97


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ids(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def by_schema(tokenizer):
    """With fields that may be left out."""
    schema = {**SCHEMA, "required": ["name", "age"]}
    return constraint(tokenizer, json_schema=json.dumps(schema))


def walk(fresh, rng, most):
    """Random tokens that a grammar allows, up to its end."""
    said: list[int] = []
    while len(said) < most and (EOS not in said):
        mask = fresh().mask(said, SIZE)
        choices = np.flatnonzero(mask)
        said.append(int(rng.choice(choices)))
        if fresh().end(Accepted(Tree.chain(), (0,), said[-1]), said[:-1]).ends:
            break
    return said


@pytest.mark.parametrize("seed", range(4))
def test_masks_at_random_paths_in_any_order_are_those_of_a_fresh_matcher(tokenizer, seed):
    rng = np.random.default_rng(seed)
    known, runs = by_schema(tokenizer), []
    for _ in range(3):
        runs.append(walk(lambda: by_schema(tokenizer), rng, 30))
    for _ in range(60):
        path = runs[int(rng.integers(3))]
        path = path[: int(rng.integers(len(path) + 1))]
        if rng.random() < 0.3:
            path = [*path, int(rng.integers(SIZE))]
        other = by_schema(tokenizer)
        mask, expected = known.mask(path, SIZE), other.mask(path, SIZE)
        assert (mask is None) == (expected is None)
        assert mask is None or (mask == expected).all()
        assert known.forced_tokens(path) == other.forced_tokens(path)


def test_a_token_is_allowed_where_the_mask_has_it_and_forced_ones_are_alone_in_it(tokenizer):
    known, chosen, forced = by_schema(tokenizer), 0, 0
    for seed in range(3):
        said = walk(lambda: by_schema(tokenizer), np.random.default_rng(seed), 40)
        for end in range(len(said)):
            mask = known.mask(said[:end], SIZE)
            if run := known.forced_tokens(said[:end]):
                assert np.flatnonzero(mask).tolist() == run[:1]
                assert known.run(said[:end], run) == len(run)
                forced += 1
            else:
                allowed = [known.run(said[:end], [token]) == 1 for token in range(SIZE)]
                assert allowed == mask.tolist()
                chosen += 1
    assert chosen > 10 and forced > 10


@pytest.mark.parametrize("seed", range(3))
def test_the_nodes_that_are_kept_of_a_tree_are_those_whose_paths_are_allowed(tokenizer, ids, seed):
    rng, history = np.random.default_rng(seed), ids('{"name": "')
    likely = ids('aB",: "age1')
    tokens, parents = random_tree(rng, 40, len(likely))
    tree = Tree(tuple(likely[t] for t in tokens), (-1, *parents))
    known, expected = by_schema(tokenizer), [0]
    for node in range(1, len(tree)):
        path = [tree.drafted[n - 1] for n in np.flatnonzero(tree.ancestors[node]) if n]
        if by_schema(tokenizer).run(history, path) == len(path):
            expected.append(node)
    assert known.nodes(tree, history) == expected
    assert 3 < len(expected) < len(tree)


def test_an_answer_is_cut_where_its_grammar_ends_and_not_where_it_may_go_on(tokenizer, ids):
    known = constraint(tokenizer, regex="ab?")
    a, b = ids("ab")
    tree = tree_of([a, b, b], [-1, 0, 1])
    whole = known.end(Accepted(tree, (0, 1, 2), EOS), [a])
    assert (whole.path, whole.tokens, whole.ends) == ((0,), (b,), True)
    other = known.end(Accepted(Tree.chain(), (0,), a), [])
    assert (other.tokens, other.ends) == ((a,), False)
    chosen = known.end(Accepted(Tree.chain(), (0,), EOS), [a])
    assert (chosen.tokens, chosen.ends) == ((EOS,), True)


def test_what_is_forced_is_a_chain_of_certain_drafts_no_longer_than_allowed(tokenizer, ids):
    known = by_schema(tokenizer)
    tree = known.forced_tree([], 100)
    assert tree.drafted == tuple(ids('{"name": "')) and tree.is_chain
    assert set(tree.sources[1:]) == {FORCED} and set(tree.logprobs) == {0.0}
    assert known.forced_tree([], 4).drafted == tree.drafted[:4]
    assert len(known.forced_tree([], 0)) == 1, "no drafter has to be asked"
    ending = constraint(tokenizer, regex="abc")
    assert ending.forced_tree([], 9).drafted == tuple(ids("ab"))
    assert len(ending.forced_tree(ids("ab"), 9)) == 1
    assert known.forced_tree(tree.drafted, 100) is None
    plain = toy_constraint("abc", start=0, drafts=False)
    assert plain.forced_tree([], 9) is None and plain.forced_tokens([]) == [0, 1, 2]


PATTERNS = ("a(b|c)+", "(a|b)c?(ab|c)?", "abca", "(ab?|c)*")
FIRST, SKEWED = ToyDrafter(1), ToyDrafter(1)
SKEWED.table[:] = np.log([0.45, 0.05, 0.4, 0.1])


def trees(seed):
    """Random trees, most nodes of which the grammar forbids."""
    rng = np.random.default_rng(seed)
    return Scripted(lambda tokens, remaining: random_tree(rng, min(6, remaining - 1), VOCABULARY))


MADE = {
    "none": lambda sampling: NoDraft(),
    "trees": lambda sampling: trees(sampling.seed),
    "dflash": lambda sampling: BlockDiffusion(FIRST),
    "ddtree": lambda sampling: BestFirst(FIRST, None, 6),
}


def use(temperature, acceptance="match", **filters):
    sampling = SamplingConfig(temperature, **filters)
    return DecodeConfig("dflash", acceptance=acceptance, sampling=sampling)


def distance(made, pattern, config, draws=300):
    """Of answers from the law that is enumerated with `toy_allowed`, in standard deviations."""
    target = ToyTarget(VOCABULARY)
    law = enumerated_law(target, config.sampling, toy_allowed(pattern))
    assert sum(law.values()) == pytest.approx(1)
    answers = answers_of(target, made, draws, config, lambda: toy_constraint(pattern))
    assert set(answers) <= set(law)
    return chi_square(law, answers) if len(law) > 1 else 0.0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_plain_answers_follow_the_masked_law(pattern, temperature):
    assert distance(MADE["none"], pattern, use(temperature)) < 4


ADJUSTED = (
    {"presence_penalty": 1.0, "frequency_penalty": 0.7, "logit_bias": ((1, -2.0), (2, 1.0))},
    {"min_tokens": 3, "stop_token_ids": (END,)},  # and where the grammar allows no other, it ends
)
FILTERS = ({}, {"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.2}, *ADJUSTED)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_mask_comes_before_penalties_and_filters(filters):
    assert distance(MADE["none"], "(ab?|c)*", use(0.7, **filters)) < 4


@cache
def eight_answers(name, pattern, temperature, adjusted):
    more = {"repetition_penalty": 1.3, **ADJUSTED[adjusted]}
    target, config = ToyTarget(VOCABULARY), use(temperature, **more)
    return answers_of(target, MADE[name], 8, config, lambda: toy_constraint(pattern))


@pytest.mark.parametrize("name", [name for name in MADE if name != "none"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafted_answers_are_the_plain_ones_of_their_seeds(name, pattern, temperature):
    for each in range(len(ADJUSTED)):
        plain = eight_answers("none", pattern, temperature, each)
        assert eight_answers(name, pattern, temperature, each) == plain


@pytest.mark.parametrize("pattern", PATTERNS[::3])
def test_a_greedy_answer_is_the_likeliest_that_is_allowed_with_bias_and_penalties(pattern):
    target, adjusted = ToyTarget(VOCABULARY), {"repetition_penalty": 1.3, **ADJUSTED[0]}
    said, allowed = eight_answers("none", pattern, 0.0, 0)[0], toy_allowed(pattern)
    for i, token in enumerate(said):
        cold = SamplingConfig(0.01, **adjusted)
        law = conditional(target, [*PROMPT, *said[:i]], cold, allowed(said[:i]))
        assert token == law.argmax()


def test_an_answer_whose_grammar_is_over_ends_before_its_least_tokens():
    target = ToyTarget(VOCABULARY)
    config = use(0.0, min_tokens=4, stop_token_ids=(END,))
    (said,) = answers_of(target, MADE["none"], 1, config, lambda: toy_constraint("ab?"))
    assert said == (0, 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("model", "pattern"), [(FIRST, "(ab?|c)*"), (SKEWED, "[ab]{4}")])
def test_rejection_follows_the_masked_law(model, pattern, temperature):
    config = use(temperature, "reject")
    assert distance(lambda s: DrawnBlock(model, None, s), pattern, config) < 4


def test_the_law_test_notices_drafts_that_are_cut_by_what_was_drawn(monkeypatch):
    """A drawn chain that ends before its first forbidden token no longer follows q."""
    from dflash_mlx.engine import drafter

    def cut(proposal, state):
        kept = state.constraint.nodes(proposal.tree, state.tokens)
        return proposal.part(kept)

    monkeypatch.setattr(drafter, "allowed", cut)
    config = use(1.0, "reject")
    assert distance(lambda s: DrawnBlock(SKEWED, None, s), "[ab]{4}", config) > 4


def test_the_law_test_notices_a_mask_that_comes_too_late(monkeypatch):
    """Filters that see forbidden tokens keep others than they should."""

    def late(self, logits, history):
        filtered = module.Sampler.adjusted(self, logits, history)
        mask = self._constraint.mask(history, logits.shape[-1])
        worst = mx.sort(filtered)[-2:-1]
        return mx.where(mx.array(mask), mx.where(filtered >= worst, filtered, -1e3), -mx.inf)

    monkeypatch.setattr(module.MaskedSampler, "adjusted", late)
    assert distance(MADE["none"], "[ab]{4}", use(0.7, top_k=2)) > 4


@pytest.mark.parametrize(("name", "drafts"), [*((name, True) for name in MADE), ("none", False)])
def test_an_answer_ends_with_its_grammar_and_takes_no_pass_for_the_end_token(name, drafts):
    target, config = ToyTarget(VOCABULARY), use(0.7, seed=1)
    drafter, known = MADE[name](config.sampling), toy_constraint("abca", drafts=drafts)
    found = list(rounds_of(target, drafter, PROMPT, config, constraint=known))
    tokens = [token for round_ in found for token in round_.accepted.tokens]
    assert tokens == [0, 1, 2, 0] and found[-1].accepted.ends
    assert len(found) == (2 if drafts else 4), "all but the first are certain, and drafted"
    assert END not in tokens


def test_near_ties_under_a_grammar_are_decided_as_plain_decoding_decides_them(tokenizer):
    """Of letters alone, so that nearly every token is a choice among many."""
    target, loose = Rounding("llama", 3 * FAMILIES["llama"]), 0

    def said(prompt, drafter, config):
        known = constraint(tokenizer, len(prompt), regex="[A-Za-z ]{48}")
        found = rounds_of(target, drafter, prompt, config, constraint=known)
        return [token for round_ in found for token in round_.accepted.tokens]

    for seed in range(3):
        prompt = prompt_of(seed)
        plain = said(prompt, NoDraft(), LOOSE)
        assert len(plain) == 48
        assert said(prompt, foretold(prompt, plain, seed), EXACT) == plain
        loose += said(prompt, foretold(prompt, plain, seed), LOOSE) == plain
    assert loose < 3, "without the guard some answer is another"


def test_a_grammar_that_is_too_much_work_says_so(tokenizer):
    known = constraint(tokenizer, regex="a*")
    known._matcher.consume_token(EOS + 40)  # an error, as of any limit
    with pytest.raises(DFlashError, match="gave up .* into the answer"):
        known.mask([], SIZE)
