"""A selector in training: what it learns, its codebooks, and the folder that it goes into."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config, read_drafter
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, Network
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.train import selector
from dflash_mlx.train.selector import EmbeddingRows, MappedSelector, with_selector
from dflash_mlx.train.trainee import Trainee
from support.decoding import feed
from support.families import VOCAB_SIZE
from support.tiny_selector import RAW, trainer_of, walks
from support.tiny_training import (
    TAPS,
    WIDTH,
    arrays_of,
    drafter_config,
    make_trainee,
    tiny_target,
)


def rows_of(embedding: nn.Module) -> EmbeddingRows:
    return EmbeddingRows(embedding, VOCAB_SIZE)


def test_the_drafter_stays_as_it_is():
    drafter = make_trainee(RAW)
    before, embedding = arrays_of(drafter.network), np.array(drafter.target.embedding().weight)
    trainer = trainer_of(drafter, walks(3, 0))
    for _ in range(3):
        trainer.train_step()
    assert set(arrays_of(trainer.maps)) == {"hidden", "predecessor", "successor"}
    after = arrays_of(drafter.network)
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    assert np.array_equal(drafter.target.embedding().weight, embedding)


def test_maps_anchors_and_what_is_learned_depend_on_the_seed_alone():
    runs = [trainer_of(make_trainee(RAW), walks(5, 0), seed=seed) for seed in (3, 3, 4)]
    for _ in range(2):
        first, again, other = (arrays_of(trainer.maps) for trainer in runs)
        for name, array in first.items():
            assert array.tobytes() == again[name].tobytes()
            assert not np.array_equal(array, other[name])
        for trainer in runs:
            list(itertools.islice(trainer.losses(), 4))
    anchors = [trainer._sampler.blocks(0).anchors for trainer in runs]
    assert not np.array_equal(anchors[0], anchors[2])


# Maps, written out


@pytest.mark.parametrize("rows", [20, 4096])
def test_codebooks_give_the_edges_that_the_maps_give(monkeypatch, rows):
    monkeypatch.setattr(selector, "_ROWS", rows)
    made = MappedSelector(WIDTH, 8, rows_of(tiny_target().embedding()), seed=3)
    written = made.selector(SelectorConfig(8, 5))
    rng = np.random.default_rng(0)
    hidden = mx.array(rng.normal(size=(40, WIDTH)).astype(np.float32))
    before, tokens = (mx.array(rng.integers(VOCAB_SIZE, size=s)) for s in ((40,), (40, 5)))
    before[0], tokens[0, 0] = VOCAB_SIZE - 1, VOCAB_SIZE - 1
    expected = np.array(made(hidden, before, tokens))
    found = np.array(written.edges(hidden, before[:, None], tokens)[:, 0])
    assert np.abs(found - expected).max() < 1e-4 < np.abs(expected).max()


@pytest.mark.parametrize("length", [0.2, 30.0])
def test_a_selector_starts_small_whatever_the_embedding_s_length_is(length):
    drafter = make_trainee(RAW)
    trainer = trainer_of(drafter, walks(4, 0), rank=32)
    states, before, tokens, *_ = trainer.batch(trainer._sampler.blocks(0))
    embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
    embedding.weight = drafter.target.embedding().weight * length
    made = MappedSelector(WIDTH, 32, rows_of(embedding), seed=0)
    edges = np.array(made(states, before, tokens))
    assert 0.01 < edges.std() < 1
    lengths = np.linalg.norm(np.array(rows_of(embedding)(mx.arange(VOCAB_SIZE))), axis=-1)
    assert lengths.mean() == pytest.approx(1, rel=0.1)


# As a folder of version 2


def random_features() -> mx.array:
    rows = np.random.default_rng(0).normal(size=(16, len(TAPS) * WIDTH))
    return mx.array(rows.astype(np.float32))


def block_logits(network: Network, drafter: Trainee) -> np.ndarray:
    model = BlockModel(network, drafter.config, tiny_target())
    context = model.new_context()
    feed(context, random_features())
    return np.array(model.logits(context, mx.array([7]), drafter.config.block_size, [(), (3,)]))


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@pytest.mark.parametrize("changes", [{}, SLIDING, {"is_causal": True}], ids=str)
def test_a_saved_folder_is_the_drafter_that_it_was_but_for_its_selector(tmp_path, changes):
    raw = drafter_config(note="mine", dflash={"output_multiplier": 0.5}, **changes)
    drafter = make_trainee(raw)
    drafter.network.set_dtype(mx.bfloat16)  # what a folder keeps
    drafter.network.set_dtype(mx.float32)
    made = MappedSelector(WIDTH, 8, rows_of(tiny_target().embedding()), seed=1)
    both = with_selector(drafter, made, SelectorConfig(8, 5))
    both.save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {**both.raw, "dtype": "bfloat16"} and written["note"] == "mine"
    assert "block_size" not in written
    config = read_config(tmp_path)
    assert config.selector == SelectorConfig(8, 5) and config.convolution is not None
    same = replace(config, selector=None, convolution=None)
    assert same == drafter.config
    network = load_network(tmp_path, config, mx.float32)
    assert not any(isinstance(layer, ConvolvedLayer) for layer in network.layers)
    full = read_drafter(tmp_path).network()  # as another program would make it
    full.set_dtype(mx.float32)
    assert all(isinstance(layer, ConvolvedLayer) for layer in full.layers)
    expected = block_logits(drafter.network, drafter)
    assert np.array_equal(block_logits(network, drafter), expected)
    assert np.array_equal(block_logits(full, drafter), expected)
