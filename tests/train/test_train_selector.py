"""A selector in training: what it learns, its codebooks, and the folder that it goes into."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config, read_drafter
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, Network
from dflash_mlx.drafters.dflash.save import save_drafter
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.train import maps, selector
from dflash_mlx.train.evaluate import Drafter, embed, measure
from dflash_mlx.train.maps import EmbeddingRows, MappedSelector, with_selector
from dflash_mlx.train.packed import hidden_states
from dflash_mlx.train.selector import SelectorTrainer, steps
from dflash_mlx.train.vocabulary import DraftVocabulary
from support.drafter_formats import SCALES
from support.families import VOCAB_SIZE
from support.tiny_selector import RAW, plain_drafter, trainer_of, walks, weights_of
from support.tiny_training import TAPS, WIDTH, drafter_config, make_network, tiny_target


def selected(trainer: SelectorTrainer, drafter: Drafter) -> Drafter:
    """The drafter with what was trained."""
    config = SelectorConfig(trainer.config.rank, trainer.config.top_k)
    return with_selector(drafter, RAW, trainer.maps, config)[0]


def rows_of(embedding: nn.Module) -> EmbeddingRows:
    return EmbeddingRows(embedding, VOCAB_SIZE)


# What it learns


def test_a_selector_learns_what_the_token_before_decides():
    drafter, train, held_out = plain_drafter(), walks(12, 0), walks(4, 50)
    assert measure(drafter, held_out).tokens_per_round < 1.3
    trainer = trainer_of(drafter, train, rank=32, steps=200, learning_rate=0.02)
    losses = [loss for _, loss in steps(trainer)]
    assert len(losses) == trainer.step == 200
    assert np.mean(losses[-10:]) < 0.02 * losses[0]
    found = measure(selected(trainer, drafter), held_out)
    assert found.by_position[0] > 0.9 and found.tokens_per_round > 5


def test_the_drafter_stays_as_it_is():
    drafter = plain_drafter()
    before = {n: np.array(a) for n, a in tree_flatten(drafter.network.parameters())}
    trainer = trainer_of(drafter, walks(3, 0))
    embedding = np.array(drafter.target.embedding().weight)
    for _ in range(3):
        trainer.train_step(0.0)
    assert set(weights_of(trainer)) == {"hidden", "predecessor", "successor"}
    after = dict(tree_flatten(drafter.network.parameters()))
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    assert np.array_equal(drafter.target.embedding().weight, embedding)


@pytest.mark.parametrize("changed", [None, "seed", "learning_rate"])
def test_the_same_seed_gives_the_same_weights(changed):
    drafter, texts = plain_drafter(), walks(5, 0)
    other = {} if changed is None else {changed: 1}
    runs = [trainer_of(drafter, texts), trainer_of(drafter, texts, **other)]
    if changed == "seed":
        first, second = (weights_of(trainer) for trainer in runs)
        assert not any(np.array_equal(first[name], second[name]) for name in first)
        anchors = [trainer._sampler.blocks(0).anchors for trainer in runs]
        assert not np.array_equal(*anchors)
    for trainer in runs:
        for i in range(4):
            trainer.train_step(i / 4)
    first, second = (weights_of(trainer) for trainer in runs)
    same = [first[name].tobytes() == second[name].tobytes() for name in first]
    assert all(same) if changed is None else not any(same)


def test_the_learning_rate_rises_and_falls():
    trainer = trainer_of(plain_drafter(), walks(3, 0), learning_rate=1.0, warmup=3)
    found = []
    for progress in (0, 0, 0, 0, 0.5, 1):
        trainer.train_step(progress)
        found.append(float(trainer._optimizer.learning_rate))
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 0.51, 0.02])


def test_a_run_ends_when_its_minutes_are_over(monkeypatch):
    times = iter([100.0, 130.0, 190.0, 221.0])
    monkeypatch.setattr(selector.time, "perf_counter", lambda: next(times))
    trainer = trainer_of(plain_drafter(), walks(3, 0), steps=None, minutes=2.0)
    assert [progress for progress, _ in steps(trainer)] == [0.25, 0.75, 1]


# Maps, written out


@pytest.mark.parametrize("rows", [20, 97, 4096])
def test_codebooks_give_the_edges_that_the_maps_give(monkeypatch, rows):
    monkeypatch.setattr(maps, "_ROWS", rows)
    made = MappedSelector(WIDTH, 8, rows_of(tiny_target().embedding()), seed=3)
    written = made.selector(SelectorConfig(8, 5))
    rng = np.random.default_rng(0)
    hidden = mx.array(rng.normal(size=(40, WIDTH)).astype(np.float32))
    before, tokens = (mx.array(rng.integers(VOCAB_SIZE, size=s)) for s in ((40,), (40, 5)))
    before[0], tokens[0, 0] = VOCAB_SIZE - 1, VOCAB_SIZE - 1
    expected = np.array(made(hidden, before, tokens))
    found = np.array(written.edges(hidden, before[:, None], tokens)[:, 0])
    assert np.abs(found - expected).max() < 1e-4 < np.abs(expected).max()


@pytest.mark.parametrize("length", [0.2, 1.0, 30.0])
def test_a_selector_starts_small_whatever_the_embedding_s_length_is(length):
    drafter = plain_drafter()
    trainer = trainer_of(drafter, walks(4, 0), rank=32)
    states, before, tokens, *_ = trainer._batch(trainer._sampler.blocks(0))
    embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
    embedding.weight = drafter.target.embedding().weight * length
    made = MappedSelector(WIDTH, 32, rows_of(embedding), seed=0)
    edges = np.array(made(states, before, tokens))
    assert 0.01 < edges.std() < 1
    lengths = np.linalg.norm(np.array(rows_of(embedding)(mx.arange(VOCAB_SIZE))), axis=-1)
    assert lengths.mean() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("method", [{}, SCALES], ids=["plain", "scaled and capped"])
def test_training_sees_the_logits_that_drafting_sees(method):
    drafter = plain_drafter(**drafter_config(dflash=method))
    config, size = drafter.config, drafter.config.block_size
    inputs = np.array([[[7, *[config.mask_token_id] * (size - 1)]]])
    features, anchors = random_features()[None], mx.array([[20]])
    x = embed(drafter.target, config, inputs)
    states = hidden_states(drafter.network, config, features, anchors, x)
    found = np.array(drafter.logits(states)[0, 0, 1:])
    expected = block_logits(drafter.network, drafter)[: size - 1]
    assert np.abs(found - expected).max() < 1e-4 < np.abs(expected).max()
    words = DraftVocabulary(drafter.target, config, walks(3, 0), 20)
    chosen = np.array(words.logits(states[0, 0, 1:]))
    assert np.abs(chosen - expected[:, words.tokens]).max() < 1e-4


# As a folder of version 2


def saved(folder: Path, raw: dict[str, Any], drafter: Drafter) -> tuple[Path, dict[str, Any]]:
    """The drafter with a selector that was not trained."""
    made = MappedSelector(WIDTH, 8, rows_of(tiny_target().embedding()), seed=1)
    both, told = with_selector(drafter, raw, made, SelectorConfig(8, 5))
    save_drafter(folder, both.network, told)
    return folder, told


def rounded(raw: dict[str, Any]) -> Drafter:
    """A random drafter whose numbers a folder keeps."""
    drafter = Drafter(*make_network(raw), tiny_target())
    drafter.network.set_dtype(mx.bfloat16)
    drafter.network.set_dtype(mx.float32)
    return drafter


def random_features() -> mx.array:
    rows = np.random.default_rng(0).normal(size=(20, len(TAPS) * WIDTH))
    return mx.array(rows.astype(np.float32))


def block_logits(network: Network, drafter: Drafter) -> np.ndarray:
    model = BlockModel(network, drafter.config, tiny_target())
    context = model.new_context()
    context.append(random_features())
    return np.array(model.logits(context, mx.array([7]), drafter.config.block_size, [(), (3,)]))


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@pytest.mark.parametrize("changes", [{}, SLIDING, {"is_causal": True}], ids=str)
def test_a_saved_folder_is_the_drafter_that_it_was_but_for_its_selector(tmp_path, changes):
    raw = drafter_config(note="mine", dflash={"output_multiplier": 0.5}, **changes)
    drafter = rounded(raw)
    folder, told = saved(tmp_path, raw, drafter)
    written = json.loads((folder / "config.json").read_text())
    assert written == {**told, "dtype": "bfloat16"} and written["note"] == "mine"
    assert "block_size" not in written
    config = read_config(folder)
    assert config.selector == SelectorConfig(8, 5) and config.convolution is not None
    same = replace(config, selector=None, convolution=None)
    assert same == drafter.config
    network = load_network(folder, config, mx.float32)
    assert not any(isinstance(layer, ConvolvedLayer) for layer in network.layers)
    expected = block_logits(drafter.network, drafter)
    assert np.array_equal(block_logits(network, drafter), expected)
    assert np.array_equal(block_logits(make_full(folder), drafter), expected)


def make_full(folder: Path) -> Network:
    """The network with its convolutions, as another program would make it."""
    network = read_drafter(folder).network()
    network.set_dtype(mx.float32)
    assert all(isinstance(layer, ConvolvedLayer) for layer in network.layers)
    return network


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_folder_has_no_convolutions_either(tmp_path, bits):
    raw = drafter_config()
    drafter = rounded(raw)
    folder, _ = saved(tmp_path / "second", raw, drafter)
    save_drafter(tmp_path / "first", drafter.network, raw)
    first, second = (
        load_network(path, read_config(path), mx.float32, bits)
        for path in (tmp_path / "first", folder)
    )
    assert not any(isinstance(layer, ConvolvedLayer) for layer in second.layers)
    assert np.array_equal(block_logits(first, drafter), block_logits(second, drafter))
