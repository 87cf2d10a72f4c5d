"""EAGLE-3 drafts what the NumPy reference drafts: every layout, chains and trees, any context."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.eagle3.drafter import Chain, GrownTree
from dflash_mlx.engine.state import State
from dflash_mlx.verifier.model import Target
from kernels_metal.emulator import emulated
from support import reference_eagle3 as reference
from support.decoding import open_with, path_to, paths_of, tree_of
from support.drafter_formats import difference, written
from support.families import VOCAB_SIZE, make_model
from support.reference_eagle3 import FORMATS, TAPS, WIDTH
from support.toys import ToyCache, random_tree

TOLERANCE = 1e-4


class Drafting:
    """A drafter folder and the model of it, bound to a tiny target."""

    def __init__(
        self, folder: Any, raw: Any, tensors: Any, target: Target, **settings: Any
    ) -> None:
        self.raw, self.tensors = raw, tensors
        self.model = written(folder, raw, tensors, target, **settings)
        table = np.array(target.embedding().weight)
        self.tables = table, table

    def context(self, tokens: Any, features: Any, *splits: int) -> Any:
        """A context that took these in, part by part."""
        context = self.model.new_context()
        grow(context, tokens, features, *splits)
        return context

    def state(self, tokens: Any, features: Any, anchor: int, *splits: int) -> State:
        state = State(ToyCache(), self.context(tokens, features, *splits))
        open_with(state, anchor)
        return state

    def chain_error(self, context: Any, tokens: Any, features: Any, path: list[int]) -> float:
        """How far the logits of a chain are from the reference, at every step."""
        draft, worst = self.model.begin(context), 0.0
        for i, token in enumerate(path):
            found = np.array(draft.logits(mx.array([token]), [i - 1])[0])
            worst = max(worst, difference(found, self.expected(tokens, features, path[: i + 1])))
        return worst

    def expected(self, tokens: Any, features: Any, path: list[int]) -> np.ndarray:
        return reference.logits(self.tensors, self.raw, self.tables, tokens, features, path)


def grow(context: Any, tokens: Any, features: Any, *splits: int) -> None:
    start = 0
    for size in splits or (len(tokens),):
        end = start + size
        context.append(mx.array(tokens[start:end]), mx.array(features[start:end]))
        start = end
    assert start == len(tokens)


def text(length: int, seed: int = 0) -> tuple[list[int], np.ndarray]:
    """Random tokens and features."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(length, WIDTH * len(TAPS))).astype(np.float32)
    return rng.integers(VOCAB_SIZE, size=length).tolist(), features


@pytest.fixture(scope="module")
def target():
    return Target(make_model("llama"), 512, "llama")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory, target):
    made: dict[str, Drafting] = {}

    def get(name: str) -> Drafting:
        if name not in made:
            made[name] = Drafting(tmp_path_factory.mktemp("drafter"), *FORMATS[name], target)
        return made[name]

    return get


# Every layout


@pytest.mark.parametrize("name", FORMATS)
def test_every_step_of_a_chain_has_the_logits_of_the_reference(drafting, name):
    subject, (tokens, features) = drafting(name), text(13)
    context = subject.context(tokens, features, 6, 1, 5, 1)
    assert subject.chain_error(context, tokens, features, [7, 3, 96, 3, 12, 0]) < TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
def test_every_node_of_a_tree_has_the_logits_of_the_reference(drafting, name):
    subject, (tokens, features) = drafting(name), text(9)
    drafted, parents = random_tree(np.random.default_rng(5), 14, VOCAB_SIZE)
    tree = tree_of([7, *drafted], [-1, *parents])
    draft, row_of, worst = subject.model.begin(subject.context(tokens, features)), {}, 0.0
    paths, depths = [[7, *path] for path in paths_of(tree)], tree.depths
    assert max(depths) >= 3 and len(depths) > 10
    for depth in range(max(depths) + 1):
        nodes = [node for node, deep in enumerate(depths) if deep == depth]
        behind = [row_of.get(tree.parents[node], -1) for node in nodes]
        found = draft.logits(mx.array([paths[node][-1] for node in nodes]), behind)
        for node, row in zip(nodes, found, strict=True):
            row_of[node] = len(row_of)
            expected = subject.expected(tokens, features, paths[node])
            worst = max(worst, difference(np.array(row), expected))
    assert worst < TOLERANCE


# Trees


def test_a_greedy_chain_takes_the_likeliest_token_at_every_step(drafting):
    subject, (tokens, features) = drafting("raw"), text(11)
    state = subject.state(tokens, features, 7)
    tree = Chain(subject.model).draft(state, 100).tree
    assert tree.is_chain and len(tree) == 8
    path = [7]
    for token in tree.drafted:
        assert token == subject.expected(tokens, features, path).argmax()
        path.append(token)


@pytest.mark.parametrize(
    ("remaining", "size", "rows"), [(1, None, 1), (2, None, 2), (5, 3, 3), (9, 8, 8)]
)
def test_no_path_is_longer_than_the_block_or_the_room(drafting, remaining, size, rows):
    subject, (tokens, features) = drafting("raw"), text(11)
    state = subject.state(tokens, features, 7)
    for drafter in (Chain(subject.model, size), GrownTree(subject.model, size, 2, 200)):
        assert max(drafter.draft(state, remaining).tree.depths) == rows - 1


@pytest.mark.parametrize("size", [1, 9])
def test_another_block_size_is_refused(drafting, size):
    with pytest.raises(DFlashError, match=f"block_size is {size}, .* choose 2 to 8"):
        Chain(drafting("raw").model, size)


@pytest.mark.parametrize(("branches", "nodes"), [(1, 8), (2, 9), (4, 30), (50, 12)])
def test_the_tree_holds_the_likeliest_of_the_paths_that_were_continued(drafting, branches, nodes):
    """EAGLE-2, worked out with the reference alone."""
    subject, (tokens, features) = drafting("ours"), text(8)
    state = subject.state(tokens, features, 7)
    tree = GrownTree(subject.model, 4, branches, nodes).draft(state, 100).tree
    offered: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(3):
        longer = {}
        for path in frontier:
            laws = subject.expected(tokens, features, [7, *path])
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


def test_a_head_of_the_target_s_can_be_limited_to_likely_tokens_and_those_of_the_text(
    tmp_path, target
):
    subject, (tokens, features) = Drafting(tmp_path, *FORMATS["ours"], target), text(9)
    likely = np.roll(np.arange(VOCAB_SIZE), 30)
    subject.model.limit_vocabulary(target, likely, 20)
    state = subject.state(tokens, features, 7)
    known = {*likely[:20].tolist(), *tokens}
    spare = {*likely[: 20 + len(known) + 32].tolist(), *tokens}
    drafted = GrownTree(subject.model, None, 8, 40).draft(state, 100).tree.drafted
    assert set(drafted) <= spare and not spare >= set(range(VOCAB_SIZE))


def test_trees_through_emulated_kernels_are_those_of_stock_mlx(tmp_path):
    """Every pass but the first has more keys of its own than rows."""
    target = Target(make_model("llama"), 512, "tiny")
    raw = reference.raw(
        head_dim=64, num_attention_heads=2, num_key_value_heads=1
    )  # which they take
    subject, (tokens, features) = Drafting(tmp_path, *reference.case(raw), target), text(9)
    state = subject.state(tokens, features, 7)
    drafters = Chain(subject.model, 4), GrownTree(subject.model, 4, 3, 20)
    expected = [drafter.draft(state, 9).tree.drafted for drafter in drafters]
    target.use_kernels("on")
    with emulated() as run:
        found = [drafter.draft(state, 9).tree.drafted for drafter in drafters]
    assert found == expected
    ran = [counters.kernel for counters in run.counters]
    assert ran.count("cascade_attention") == 3 + 3


def test_rows_behind_more_of_the_draft_than_kernels_take_go_through_stock_mlx(tmp_path):
    raw = reference.raw(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    target = Target(make_model("llama"), 512, "tiny")
    subject, (tokens, features) = Drafting(tmp_path, *reference.case(raw), target), text(9)
    context = subject.state(tokens, features, 7).context

    def logits() -> mx.array:
        """Of 40 rows behind 1,000 and of 3 behind these: more than kernels see of one draft."""
        draft = subject.model.begin(context)
        for parents in ([-1], [0] * 999, [5] * 40, [7] * 3):
            found = draft.logits(mx.arange(len(parents)) % VOCAB_SIZE, parents)
        return found

    expected = logits()
    target.use_kernels("on")
    with emulated() as run:
        found = logits()
    known = expected > -mx.inf
    assert mx.abs(mx.where(known, found - expected, 0)).max() < 1e-4
    ran = [counters.kernel for counters in run.counters]
    assert ran.count("cascade_attention") == 1, "the first pass alone"


# The context


@pytest.mark.parametrize("name", ["raw", "3.1, norms per layer", "speculators, sliding"])
@pytest.mark.parametrize("length", [0, 1, 2, 13, 16, 17, 18, 29, 30])
def test_a_trimmed_context_that_grows_again_drafts_like_a_fresh_one(drafting, name, length):
    subject, (tokens, features) = drafting(name), text(30)
    others, more = text(10, seed=1)
    context = subject.context(tokens, features, 17, 1, 1, 11)
    _ = context.cache
    assert context.refill_from(length) == length
    context.trim(length)
    assert context.length == length
    tokens, features = [*tokens[:length], *others], np.concatenate([features[:length], more])
    grow(context, others, more, 3, 7)
    assert subject.chain_error(context, tokens, features, [7, 3, 5]) < TOLERANCE


def test_drafts_leave_the_context_as_it_is(drafting):
    subject, (tokens, features) = drafting("raw"), text(30)
    context = subject.context(tokens[:20], features[:20])
    for drafter in (Chain(subject.model), GrownTree(subject.model, None, 4, 30)):
        state = State(ToyCache(), context)
        open_with(state, 7)
        trees = [drafter.draft(state, 100).tree for _ in range(2)]
        assert trees[0].drafted == trees[1].drafted and context.length == 20
    grow(context, tokens[20:], features[20:], 4, 6)
    assert subject.chain_error(context, tokens, features, [7, 3, 5]) < TOLERANCE


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("bits", [None, 8])
def test_long_contexts_outgrow_their_storage(tmp_path, drafting, target, window, bits):
    """Slots come in steps of 256, and a draft may need the first of the next."""
    raw = reference.raw(head_dim=32)
    target.kv_bits = bits
    try:
        subject = Drafting(tmp_path, *reference.case(raw), target, draft_window=window)
    finally:
        target.kv_bits = None
    if window is not None:
        subject.raw = {**raw, "layer_types": ["sliding_attention"], "sliding_window": window}
    tokens, features = text(258)
    for length in (253, 256, 258):
        context = subject.context(tokens[:length], features[:length], 200, length - 200)
        given = tokens[:length], features[:length], [7, 3, 5, 9]
        assert subject.chain_error(context, *given) < (TOLERANCE if bits is None else 0.5)


def test_a_context_with_a_window_goes_back_no_further_than_it_reaches(tmp_path, target):
    subject = Drafting(tmp_path, *FORMATS["raw"], target, draft_window=8)
    subject.raw = {**subject.raw, "layer_types": ["sliding_attention"], "sliding_window": 8}
    tokens, features = text(600)
    context = subject.context(tokens, features, 300, 300)
    assert context.refill_from(599) == 599
    assert (back := context.refill_from(100)) < 100
    context.trim(back)
    grow(context, tokens[back:100], features[back:100])
    given = tokens[:100], features[:100], [7, 3, 5]
    assert subject.chain_error(context, *given) < TOLERANCE


def test_features_wait_until_a_draft_or_many_of_them_ask(drafting):
    tokens, features = text(70)
    context = drafting("raw").context(tokens[:5], features[:5], 1, 3, 1)
    assert context.length == 5 and context._cache.length == 0
    assert context.cache.length == 4
    grow(context, tokens[5:], features[5:])
    assert context.length == 70 and context._cache.length == 69


def test_a_context_without_features_is_refused(drafting):
    with pytest.raises(ValueError, match="no features"):
        drafting("raw").model.new_context().append(mx.array([1]), None)
