"""Domino's head: what a GRU reads of the block so far, in walks, in drawn paths and in trees."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.core.config import SamplingConfig
from dflash_mlx.drafters.block_diffusion import BestFirst, DrawnPath, RankedChain
from dflash_mlx.drafters.dflash.block_model import Ask
from dflash_mlx.drafters.dflash.domino import DominoLinks, PrefixGRU
from dflash_mlx.train.dflash import DFlashTrainee
from support import reference_domino
from support.decoding import linked_of
from support.drafter_formats import DOMINO, case
from support.drafting import TOLERANCE, Blocks
from support.families import VOCAB_SIZE
from support.law import chi_square


def walked_scores(subject: Any, prefix: tuple[int, ...], path: list[int]) -> Any:
    """The scores [n, V] along a path behind what a block shows."""
    model, rows = subject.model, subject.model.block_size
    context, shown = subject.context(subject.text(9, 3)), mx.array([7, *prefix])
    states = model._states(Ask(context, mx.array([7]), rows, (prefix,)))
    logits, _ = model.head.logits(states, None)
    found = model.links.candidates(states, logits, shown, None)
    return np.array(found.walk(lambda t, scores: mx.array(path[t]))[1])


@pytest.mark.parametrize("prefix", [(), (3,), (3, 50, 4)], ids=len)
@pytest.mark.parametrize("name", DOMINO)
def test_along_any_path_scores_are_the_reference_s(drafting, name, prefix):
    subject = drafting(name)
    block = subject.block(3, 7, prefix=prefix)
    path = [(31 * i + 5) % VOCAB_SIZE for i in range(len(block.states))]
    found = walked_scores(subject, prefix, path)
    expected = np.stack([block.row(tuple(path[:t])) for t in range(len(path))])
    assert np.abs(found - expected).max() / np.abs(expected).max() < TOLERANCE
    other = walked_scores(subject, prefix, [path[0] + 1, *path[1:]])
    assert np.array_equal(found[0], other[0])
    assert np.abs(found[-1] - other[-1]).max() > 100 * TOLERANCE, "the first token is remembered"


READ = PrefixGRU.__call__


def as_keras(gru: PrefixGRU, x: mx.array, state: mx.array) -> mx.array:
    """With the gates in the order update, reset, new."""
    other, turned = PrefixGRU(x.shape[-1], state.shape[-1]), [1, 0, 2]
    for name in ("weight_ih_l0", "weight_hh_l0"):
        gates = mx.split(gru[name], 3)
        other[name] = mx.concatenate([gates[i] for i in turned])
    return READ(other, x, state)


MISTAKES: dict[str, Any] = {
    "gates in another order": (PrefixGRU, "__call__", as_keras),
    "the state is forgotten": (
        PrefixGRU, "__call__", lambda gru, x, state: READ(gru, x, mx.zeros_like(state)),
    ),
    "what a block shows is not read": (
        DominoLinks, "_states", lambda links, _: [links._gru.start()],
    ),
    "pure positions are counted from what is shown": (
        DominoLinks, "_first", lambda links, _: links._pure,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_reference_notices(drafting, monkeypatch, mistake):
    monkeypatch.setattr(*MISTAKES[mistake])
    subject, prefix = drafting("domino, from masks"), (3,)
    block = subject.block(3, 7, prefix=prefix)
    path = [8] * len(block.states)
    found = walked_scores(subject, prefix, path)
    expected = np.stack([block.row(tuple(path[:t])) for t in range(len(path))])
    assert np.abs(found - expected).max() / np.abs(expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", DOMINO)
def test_q_is_the_law_behind_all_tokens_drawn_before(drafting, name):
    subject = drafting(name)
    state, block = subject.behind(2, 9), subject.block(2, 9)
    for seed in range(4):
        sampling = SamplingConfig(seed=seed, temperature=0.8)
        proposal = DrawnPath(subject.model, None, sampling, weighed=True).draft(state, 100)
        q, path = np.array(proposal.q), proposal.tree.drafted
        expected = np.stack([block.after(path[:t], 0.8) for t in range(len(path))])
        assert q.shape == expected.shape and np.abs(q - expected).max() < TOLERANCE
        walk = tuple(block.greedy())
        sure = [block.after(walk[:t], 0.8).max() for t in range(len(walk))]
        assert np.allclose(np.exp(proposal.tree.logprobs[1:]), sure, atol=TOLERANCE)


def path_law(block: Any, temperature: float, reads: int) -> dict[tuple[int, ...], float]:
    """The probability of every likely path. reads: how many of the last tokens the GRU sees."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for t in range(len(block.states)):
        longer = {}
        for path, chance in law.items():
            shares = block.after(path, temperature, reads)
            longer |= {(*path, token): chance * share for token, share in enumerate(shares)}
        law = {path: chance for path, chance in longer.items() if chance > 1e-5 or t == 2}
    return law


def test_drawn_paths_follow_the_law_of_the_walk(tmp_path, monkeypatch):
    raw = reference_domino.tiny_config(block_size=3, dflash_config={"pure_draft_prefix_len": 0})
    tensors = reference_domino.random_tensors(raw)
    tensors["embed_proj.2.weight"] *= 2  # so that few paths have most of the chance
    subject = Blocks(tmp_path, raw, tensors)
    model, state, block = subject.model, subject.behind(1, 7), subject.block(1, 7, 4)
    found = model.candidates(state.context, state.anchor, 4)
    monkeypatch.setattr(model, "candidates", lambda *block: found)  # the pass is always alike
    draws = []
    for seed in range(800):
        drawn = DrawnPath(model, None, SamplingConfig(seed=seed, temperature=0.7))
        draws.append(drawn.draft(state, 100).tree.drafted)
    law = path_law(block, 0.7, reads=99)
    assert sum(law.values()) > 0.99 and len(law) > 1000 and max(law.values()) < 0.5
    assert chi_square(law, draws) < 4
    assert chi_square(path_law(block, 0.7, reads=1), draws) > 4, "all tokens are remembered"


@pytest.mark.parametrize("name", DOMINO)
def test_a_tree_has_the_law_along_the_walk_and_behind_the_first_token_beside_it(drafting, name):
    subject, chain = drafting(name), RankedChain(drafting(name).model)
    state, block = subject.behind(5, 7), subject.block(5, 7)
    (linked,) = linked_of(subject.model, state.context, state.anchor, subject.model.block_size)
    walk = tuple(block.greedy())
    assert chain.draft(subject.behind(5, 7), 100).tree.drafted == walk
    for t in range(len(walk)):
        tokens = linked.ranked.tokens[t].tolist()
        before = linked.ranked.tokens[t - 1].tolist() if t else [7]
        for place, token in enumerate(before):
            path = (*walk[: t - 1], token) if t else ()
            law = block.after(path)
            gap = linked.logprobs[t, place] - np.log(law[tokens])
            assert np.ptp(gap) < 1e-3, "the odds of candidates are right behind each of them"
            if path == walk[:t]:
                assert np.abs(gap).max() < 1e-3 and tokens == np.argsort(-law)[:16].tolist()
    tree = BestFirst(subject.model, None, 30).draft(subject.behind(5, 7), 100).tree
    assert len(tree) == 30


def test_a_block_of_seven_drafts_seven_tokens(tmp_path):
    drafting = Blocks(tmp_path, *case(reference_domino.tiny_config(block_size=7)))
    assert drafting.model.block_size == 8
    assert len(drafting.block(0, 7).greedy()) == 7


def test_it_is_not_trained(drafting):
    with pytest.raises(DFlashError, match="drafts from its anchor's row and Domino's head"):
        DFlashTrainee.read(drafting("domino").folder, drafting("domino").target)
