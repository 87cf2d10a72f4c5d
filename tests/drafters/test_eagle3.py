"""EAGLE-3's trees, whose logits and shapes are the NumPy reference's (its chains: test_network)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError, PairConfig, generate
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.autoregressive import Chain, GrownTree
from dflash_mlx.models.load import load_pair
from dflash_mlx.verifier.model import Target
from kernels_metal.emulator import emulated
from support.configs import config_with
from support.decoding import path_to, paths_of
from support.drafting import TOLERANCE, Steps, cut, difference, drafted_tree, grow
from support.families import VOCAB_SIZE, make_model
from support.models import write_model
from support.reference_dflash import write_drafter_folder
from support.reference_eagle3 import FORMATS, case, raw


@pytest.fixture
def wide(tmp_path) -> Any:
    """With heads that kernels take, and a target of its own."""
    heads = raw(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    return Steps(tmp_path, *case(heads), Target(make_model("llama"), 512, "tiny"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_node_of_a_tree_has_the_logits_of_the_reference(drafting, name):
    subject = drafting(f"eagle3, {name}")
    text = subject.text(9)
    for path, found in drafted_tree(subject.model.begin(subject.state(7, text)), 7):
        assert difference(found, subject.after(text, path)) < TOLERANCE


def test_a_greedy_chain_takes_the_likeliest_token_at_every_step(drafting):
    subject = drafting("eagle3, raw")
    text = subject.text(11)
    tree = Chain(subject.model).draft(subject.state(7, text), 100).tree
    assert tree.is_chain and len(tree) == 8
    path = [7]
    for token in tree.drafted:
        assert token == subject.after(text, path).argmax()
        path.append(token)


@pytest.mark.parametrize(("branches", "nodes"), [(1, 8), (2, 9), (4, 30), (50, 12)])
def test_the_tree_holds_the_likeliest_of_the_paths_that_were_continued(drafting, branches, nodes):
    """EAGLE-2, worked out with the reference alone."""
    subject = drafting("eagle3, ours")
    text = subject.text(8)
    tree = GrownTree(subject.model, 4, branches, nodes).draft(subject.state(7, text), 100).tree
    offered: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(3):
        longer = {}
        for path in frontier:
            laws = subject.after(text, [7, *path])
            laws = laws - np.log(np.exp(laws - laws.max()).sum()) - laws.max()
            for token in np.argsort(-laws)[:branches]:
                longer[(*path, int(token))] = offered.get(path, 0.0) + laws[token]
        offered |= longer
        frontier = sorted(longer, key=lambda path: -longer[path])[:branches]
    best = sorted(offered, key=lambda path: -offered[path])[: nodes - 1]
    assert set(paths_of(tree)) == {(), *best}
    for node, path in enumerate(paths_of(tree)):
        reached = sum(tree.logprobs[i] for i in path_to(tree, node))
        assert reached == pytest.approx(offered.get(path, 0.0), abs=1e-3)
    assert set(tree.sources[1:]) == {"first"} and tree.sources[0] == ""


def test_trees_through_emulated_kernels_are_those_of_stock_mlx(wide):
    """Every pass but the first has more keys of its own than rows."""
    state, drafters = wide.behind(0, 7), (Chain(wide.model, 4), GrownTree(wide.model, 4, 3, 20))
    expected = [drafter.draft(state, 9).tree.drafted for drafter in drafters]
    wide.target.use_kernels("on")
    with emulated() as run:
        found = [drafter.draft(state, 9).tree.drafted for drafter in drafters]
    assert found == expected
    ran = [counters.kernel for counters in run.counters]
    assert ran.count("cascade_attention") == 3 + 3


def test_rows_behind_more_of_the_draft_than_kernels_take_go_through_stock_mlx(wide):
    state = wide.behind(0, 7)

    def logits() -> mx.array:
        """Of 40 rows behind 1,000 and of 3 behind these: more than kernels see of one draft."""
        draft = wide.model.begin(state)
        for parents in ([-1], [0] * 999, [5] * 40, [7] * 3):
            found = draft.logits(mx.arange(len(parents)) % VOCAB_SIZE, parents)
        return found

    expected = logits()
    wide.target.use_kernels("on")
    with emulated() as run:
        found = logits()
    known = expected > -mx.inf
    assert mx.abs(mx.where(known, found - expected, 0)).max() < 1e-4
    ran = [counters.kernel for counters in run.counters]
    assert ran.count("cascade_attention") == 1, "the first pass alone"


def test_features_wait_until_a_draft_or_many_of_them_ask(drafting):
    subject = drafting("eagle3, raw")
    text = subject.text(70)
    context = subject.context(cut(text, 0, 5), 1, 3, 1)
    assert context.length == 5 and context._cache.length == 0
    assert context.cache.length == 4
    grow(context, cut(text, 5, 70))
    assert context.length == 70 and context._cache.length == 69


def test_a_context_without_features_is_refused(drafting):
    with pytest.raises(ValueError, match="no features"):
        drafting("eagle3, raw").model.new_context().append(mx.array([1]), None)


def test_a_pair_with_one_is_loaded_by_name_and_answers_as_plain_decoding(tmp_path):
    model = write_model(tmp_path / "model")
    folder = write_drafter_folder(tmp_path / "drafter", *FORMATS["speculators"])
    pair = load_pair(PairConfig(str(model), str(folder)))
    assert [drafter.family for drafter in pair.drafters] == ["eagle3"]
    uses = [DecodeConfig("none"), DecodeConfig("eagle3", block_size=4), DecodeConfig("eagle3")]
    uses += [config_with("eagle3", budget=12, branches=3), DecodeConfig()]
    answers = [generate(pair, "hello", replace(use, max_tokens=16)) for use in uses]
    assert len({answer.tokens for answer in answers}) == 1
    assert sum(answers[1].statistics.drafted.values()) > 0
    with pytest.raises(DFlashError, match="block_size is 9"):
        load_pair(PairConfig(str(model), str(folder)), DecodeConfig("eagle3", block_size=9))
