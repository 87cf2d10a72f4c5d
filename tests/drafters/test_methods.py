"""Every method drafts trees that fit, and none of them changes the answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import mlx.core as mx
import pytest

from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters import budget
from dflash_mlx.drafters.autoregressive import Chain, DrawnChain, GrownTree
from dflash_mlx.drafters.block_diffusion import (
    BlockDiffusion,
    DrawnBlock,
    DrawnPath,
    RankedChain,
    SelectedPath,
)
from dflash_mlx.drafters.budget import BatchBudget
from dflash_mlx.drafters.method import MOST_NODES
from dflash_mlx.drafters.methods import METHODS, make_drafter
from dflash_mlx.drafters.specdiff.drafter import IN_ORDER, THRESHOLD, DrawnSpecDiff, SpecDiff
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support import decoding, reference_dflash2
from support.configs import config_with
from support.decoding import feed, paths_of, start, tokens_in
from support.drafter_formats import drafter_folder, written
from support.families import POSITION_DEPENDENT, make_model
from support.pairs import assistant_pair, full_pair
from support.toys import prompt_of

CASES = {
    "none": {},
    "ngram": {},
    "dflash": {},
    "dflash, block of 3": {"block_size": 3},
    "ddtree": {"budget": 12},
    "ddtree, as many as pay": {},
    "ddtree, one draft": {"budget": 2},
    "d2sd": {"budget": 12, "branches": 3},
    "d2sd, many branches": {"budget": 40, "branches": 20},
    "d2sd, as many as pay": {},
    "d2sd, published": {"growth": "paper"},
    "d2sd, published, alone": {"growth": "paper", "second": False, "levels": 3},
    "d2sd, alone": {"second": False},
    "d2sd, block of 2": {"block_size": 2},
    "d2sd, block of 2 before one of 8": {"block_size": 2, "budget": 12},
    "d2sd, shorter second": {"budget": 12, "second_block_size": 4},
    "d2sd, third level": {"budget": 12, "levels": 3},
    "d2sd, published, third level": {"growth": "paper", "levels": 3},
    "d2sd, published, longer second": {"growth": "paper", "block_size": 4, "levels": 3},
    "d2sd, published, not extended": {"growth": "paper", "block_size": 4, "extension": False},
    "specdiff, as many as pay": {},
    "specdiff, as many as pay, three passes": {"steps": 3, "schedule": "left-to-right"},
    "specdiff, a chain": {"block_size": 5},
    "specdiff, a chain of two passes": {"block_size": 6, "steps": 2},
    "specdiff": {"budget": 12, "steps": 4, "schedule": "threshold"},
    "specdiff, samples": {"branches": 5},
    "eagle3": {"budget": 12, "branches": 3},
    "eagle3, as many as pay": {},
    "eagle3, wide": {"branches": 6, "block_size": 3},
    "eagle3, a chain": {"block_size": 5},
    "assistant": {"budget": 12, "branches": 3},
    "assistant, as many as pay": {},
    "assistant, a chain": {"block_size": 5},
    "mtp": {"budget": 12, "branches": 3},
    "mtp, as many as pay": {},
    "mtp, a chain": {"block_size": 5},
    "lm": {"budget": 12, "branches": 3},
    "lm, as many as pay": {},
    "lm, wide": {"branches": 6, "block_size": 3},
    "lm, a chain": {"block_size": 5},
    "resample": {"branches": 3},
    "dflash1, a fixed block": {"block_size": 5},
}
BLOCK = 8  # of the tiny drafters
TOKENS = 28  # of an answer
GROWN = ("ddtree", "d2sd", "specdiff", "eagle3", "assistant", "mtp", "lm", "resample")
TREES = [name for name in CASES if name.startswith(GROWN)]


@pytest.fixture(autouse=True)
def known_times(monkeypatch):
    """No machine is timed, and nothing is written to the user's cache."""
    times = PassTimes((1, 96), (1.0, 3.0))
    monkeypatch.setattr(budget, "stored_times", lambda target: times)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = Target(make_model("llama"), 200, "tiny")
    return full_pair(tmp_path_factory.mktemp("pair"), target)


@pytest.fixture(scope="module")
def pair_of(pair, tmp_path_factory):
    """By the method that a case is of: assistants draft for one family of targets alone."""
    gemma = assistant_pair(tmp_path_factory.mktemp("gemma"))
    return lambda name: gemma if name.startswith("assistant") else pair


def config_of(name, **changes):
    options = {k: v for k, v in CASES[name].items() if k != "second"}
    return config_with(name.partition(",")[0], **{**options, **changes})


def drafter_of(pair, name, **changes):
    if not CASES[name].get("second", True):
        pair = replace(pair, drafters=pair.drafters[:1])  # of its family
    return make_drafter(pair, config_of(name, **changes))


def rounds(pair, name, prompt, **changes):
    config, drafter = config_of(name, **changes), drafter_of(pair, name)
    return list(decoding.rounds(pair.target, drafter, start(pair.target, drafter, prompt), config))


# What is drafted

WARM = SamplingConfig(temperature=0.7)
MATCHED = {"block_size": 5, "sampling": WARM, "acceptance": "match"}
SEEDED = {"block_size": 5, "sampling": replace(WARM, seed=1)}
FIXED, DRAWN = {"block_size": 5}, {"block_size": 5, "sampling": WARM}
REJECT = {"acceptance": "reject", "sampling": WARM}
IN_THREE = {"steps": 3, "schedule": IN_ORDER}
KINDS = [
    ("dflash", {}, BatchBudget, RankedChain),
    ("dflash", FIXED, BlockDiffusion, None),
    ("dflash", DRAWN, DrawnBlock, None),
    ("dflash, version 2", FIXED, SelectedPath, None),
    ("dflash, version 2", DRAWN, DrawnPath, None),
    ("dflash, version 2", REJECT, BatchBudget, DrawnPath),
    ("eagle3", {}, BatchBudget, GrownTree),
    ("eagle3", {"branches": 3}, BatchBudget, GrownTree),
    ("eagle3", {"budget": 9}, GrownTree, None),
    ("eagle3", FIXED, Chain, None),
    ("eagle3", {**FIXED, "branches": 3}, GrownTree, None),
    ("eagle3", DRAWN, DrawnChain, None),
    ("assistant", {}, BatchBudget, GrownTree),
    ("assistant", {"budget": 9}, GrownTree, None),
    ("assistant", FIXED, Chain, None),
    ("assistant", DRAWN, DrawnChain, None),
    ("mtp", {}, BatchBudget, GrownTree),
    ("mtp", FIXED, Chain, None),
    ("mtp", DRAWN, DrawnChain, None),
    ("lm", {}, BatchBudget, GrownTree),
    ("lm", FIXED, Chain, None),
    ("lm", DRAWN, DrawnChain, None),
    ("specdiff", {}, BatchBudget, SpecDiff),
    ("specdiff", {"branches": 4}, BatchBudget, SpecDiff),
    ("specdiff", {"budget": 9}, SpecDiff, None),
    ("specdiff", {"budget": 9, "sampling": WARM}, SpecDiff, None),
    ("specdiff", FIXED, SpecDiff, None),
    ("specdiff", {**FIXED, "branches": 3}, SpecDiff, None),
    ("specdiff", REJECT, BatchBudget, DrawnSpecDiff),
    ("specdiff", DRAWN, DrawnSpecDiff, None),
    ("specdiff", {**DRAWN, "steps": 2}, DrawnSpecDiff, None),
    ("specdiff", {**REJECT, **FIXED, **IN_THREE}, DrawnSpecDiff, None),
    ("specdiff", {**DRAWN, "steps": 2, "schedule": THRESHOLD}, SpecDiff, None),
    ("specdiff", MATCHED, SpecDiff, None),
    ("specdiff", SEEDED, SpecDiff, None),
]


@pytest.mark.parametrize(("name", "given", "kind", "within"), KINDS)
def test_chains_are_drawn_where_they_can_be_and_what_is_fixed_is_whole(
    pair_of, drafting, name, given, kind, within
):
    pair = pair_of(name)
    if "version 2" in name:
        pair = replace(pair, drafters=(drafting("version 2").model,))
    drafter = make_drafter(pair, config_with(name.partition(",")[0], **given))
    assert type(drafter) is kind and drafter.name == name.partition(",")[0]
    assert within is None or type(drafter.drafter) is within


@pytest.mark.parametrize("given", [{"budget": 9}, {"branches": 3}], ids=str)
@pytest.mark.parametrize("name", ["specdiff", "eagle3", "assistant", "mtp", "lm"])
def test_trees_are_not_rejected(pair_of, name, given):
    ((option, value),) = given.items()
    with pytest.raises(DFlashError, match=f"{option} is {value}, but acceptance is reject"):
        make_drafter(pair_of(name), config_with(name, **given, **REJECT))


# Answers

PROMPT = prompt_of(3, 12) * 2


def test_there_is_a_case_for_every_method():
    assert {name.partition(",")[0] for name in CASES} == set(METHODS)


def changes_at(temperature):
    return {"max_tokens": TOKENS, "sampling": SamplingConfig(temperature=temperature, seed=11)}


@pytest.fixture(scope="module")
def plain(pair_of):
    """Of plain decoding of the target that a method has, at a temperature."""

    @cache
    def answer(target, temperature):
        pair = Pair(target, None)
        return tokens_in(rounds(pair, "none", PROMPT, **changes_at(temperature)))

    return answer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_gives_the_answer_of_plain_decoding(pair_of, plain, name, temperature):
    """From trees that are no larger or deeper than allowed, without equal siblings."""
    pair = pair_of(name)
    found, usual = (
        rounds(pair, name, PROMPT, **changes_at(temperature)),
        plain(pair.target, temperature),
    )
    assert tokens_in(found) == usual and len(usual) == TOKENS
    config, left = config_of(name), TOKENS
    blocks = [config.block_size or 16]
    if config.method == "d2sd":
        blocks.append(CASES[name].get("second_block_size") or BLOCK)
    for accepted in found:
        tree = accepted.tree
        deepest = 16 if "lookup" in tree.sources else max(blocks) - 1
        assert max(tree.depths) <= min(left - 1, deepest)
        if name in TREES and "growth" not in CASES[name]:
            assert len(tree) <= (config.budget or MOST_NODES)
        left -= len(accepted.tokens)
        paths_of(tree)
    assert left == 0


def test_the_published_tree_has_a_branch_for_every_prefix(pair):
    tree = rounds(pair, "d2sd, published", PROMPT, max_tokens=30)[1].tree
    leaves = set(range(len(tree))) - set(tree.parents)
    assert 2 <= len(leaves) <= 5
    assert all(tree.depths[leaf] == BLOCK - 1 for leaf in leaves)


def test_a_second_block_may_be_longer_than_a_first_one_with_a_selector(pair, tmp_path):
    """Behind the whole first draft the second one goes on, past the first's last position."""
    raw = reference_dflash2.tiny_config()  # blocks of 6
    first = written(tmp_path / "a", raw, reference_dflash2.random_tensors(raw), pair.target)
    second = drafter_folder(tmp_path / "b", [1], 2, pair.target, block_size=9)
    pair = replace(pair, drafters=(first, second))
    config = config_with("d2sd", max_tokens=40, growth="paper")
    drafter, plain = make_drafter(pair, config), make_drafter(pair, DecodeConfig("none"))
    begin = partial(start, pair.target, prompt=PROMPT, config=config)
    found = list(decoding.rounds(pair.target, drafter, begin(drafter=drafter), config))
    usual = list(decoding.rounds(pair.target, plain, begin(drafter=plain), config))
    assert tokens_in(found) == tokens_in(usual)
    assert max(max(each.tree.depths) for each in found) > first.block_size - 1


def test_the_second_drafter_reads_its_own_layers(pair):
    """Both drafters' contexts together equal those of each one alone."""
    drafter = drafter_of(pair, "d2sd")
    assert drafter.aux_layers == (0, 1, 2)
    features = mx.random.normal((7, 3 * 64), key=mx.random.key(0))
    together = drafter.new_context()
    feed(together, features)
    layers = (0, 2), (1,)
    for model, context, read in zip(pair.drafters[:2], together.contexts, layers, strict=True):
        alone, parts = model.new_context(), mx.split(features, 3, axis=-1)
        feed(alone, mx.concatenate([parts[i] for i in read], axis=-1))
        assert mx.array_equal(context.arrays[0], alone.arrays[0])


@pytest.mark.parametrize("family", sorted(POSITION_DEPENDENT))
def test_trees_are_refused_where_rows_cannot_have_positions_of_their_own(family):
    target = Target(make_model(family), 100, family)
    with pytest.raises(DFlashError, match="cannot verify trees"):
        target.check_trees()


def test_a_model_without_the_usual_ropes_is_refused():
    other = SimpleNamespace(layers=[], modules=list, named_modules=list, make_cache=list)
    with pytest.raises(DFlashError, match="cannot verify trees"):
        Target(other, 100, "other").check_trees()


@pytest.mark.parametrize("changes", [{}, {"branches": 2}, {"block_size": 3}, {"lookup": False}])
def test_sessions_share_what_they_learn_as_long_as_the_settings_are_the_same(pair, changes):
    first = drafter_of(pair, "d2sd, as many as pay")
    other = drafter_of(pair, "d2sd, as many as pay", **changes)
    assert (other.experience is first.experience) == (not changes)


def test_settings_of_an_answer_make_no_drafter_and_no_experience_of_their_own(pair):
    """So what one request teaches the next one knows, and hostile ones fill no memory."""
    pair, shared = replace(pair, learned={}), Scheduler(pair)
    for i in range(3):
        biased = SamplingConfig(1.0, logit_bias=((i, 1.0),), min_tokens=i, presence_penalty=i / 2)
        for more in ({"thought_tokens": i}, {"sampling": biased}, {"logprobs": i}):
            for scheduler in (shared, Scheduler(pair)):
                scheduler.drafter(DecodeConfig("dflash", max_tokens=9 + i, **more), pair)
    assert len(shared.drafters) == 2, "one that draws, and one that does not"
    assert len([key for key in pair.learned if isinstance(key[-1], DecodeConfig)]) <= 2


def test_what_was_learned_with_other_kernels_is_not_used(pair):
    before = drafter_of(pair, "ddtree, as many as pay").experience
    mode = pair.target.kernels.mode
    pair.target.use_kernels("on" if mode != "on" else "off")
    try:
        pair.target.pass_times = PassTimes((1, 96), (1.0, 3.0))
        assert drafter_of(pair, "ddtree, as many as pay").experience is not before
    finally:
        pair.target.use_kernels(mode)
