"""Targets that see, of tiny random models: logits behind pictures are those of mlx-vlm itself."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm, the extra vision, is not installed")

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.tree import Tree
from dflash_mlx.engine.delta import collect
from dflash_mlx.engine.pair import Pair
from dflash_mlx.session.scheduler import Scheduler
from dflash_mlx.verifier.block import Block
from support.decoding import Strict, finish, path_to
from support.seeing import Characters, Reference, ask, conversation, make_target
from support.seeing_families import FAMILIES, VOCABULARY

pytestmark = pytest.mark.usefixtures("interpreted")
CLOSE = 5e-3  # of the spread of logits; Gemma 4 in one pass is 2e-3 from itself, a token a pass


def read(target, prompt, step):
    """A cache that holds a prompt, read in passes of `step` tokens, and the last logits."""
    cache = target.new_cache()
    while (first := cache.length) < len(prompt):
        last = prompt.uncut(min(first + step, len(prompt)))
        embeddings = target.embed(prompt, first, last)
        tokens = mx.array(prompt.tokens[first:last])
        logits, _ = target.forward(tokens, cache, Block(last - first), (), embeddings)
        cache.commit(range(last - first))
    return cache, logits[-1]


@pytest.mark.parametrize("pictures", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_of_a_tree_behind_pictures_has_the_logits_of_mlx_vlm(family, pictures):
    target, talk = make_target(family), conversation(pictures)
    prompt, reference = ask(target, talk), Reference(target, talk)
    assert list(prompt.tokens) == reference.inputs["input_ids"][0].tolist()
    assert len(prompt.pieces) == pictures
    scale = float(mx.std(reference.logits()))
    rng = np.random.default_rng(pictures)
    for step in (7, 512):
        cache, logits = read(target, prompt, step)
        assert float(mx.abs(logits - reference.logits()).max()) < CLOSE * scale
        tokens = rng.integers(VOCABULARY, size=9).tolist()
        parents = [-1, *(int(rng.integers(i)) for i in range(1, 9))]
        tree = Tree(tuple(tokens[1:]), tuple(parents))
        found, _ = target.forward(mx.array(tokens), cache, Block.of(tree))
        for node in range(9):
            path = path_to(tree, node)
            expected = reference.logits([tokens[i] for i in path])
            assert float(mx.abs(found[node] - expected).max()) < CLOSE * scale, (step, node)
        cache.commit(path)  # and goes on behind it
        found, _ = target.forward(mx.array([9]), cache, Block(1))
        expected = reference.logits([*(tokens[i] for i in path), 9])
        assert float(mx.abs(found[0] - expected).max()) < CLOSE * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_behind_pictures_are_mlx_vlms_own(family):
    target = make_target(family)
    for pictures in (0, 1, 3):
        talk = conversation(pictures)
        for method in ("none", "ngram"):
            config = DecodeConfig(method, max_tokens=12, prefill_step=11)
            scheduler = Scheduler(Pair(target, Characters()), observer=Strict())
            sequence = scheduler.submit(ask(target, talk), config)
            said = collect(iter(finish(scheduler)[sequence])).tokens
            expected = Reference(target, talk).greedy(12)
            ends = expected.index(0) if 0 in expected else 12
            assert list(said)[:ends] == expected[:ends]
