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

from dflash_mlx.config import SelectorTraining
from dflash_mlx.corpus.rows import Row
from dflash_mlx.drafters.block_model import BlockModel
from dflash_mlx.drafters.checkpoint import load_network, read_config, read_drafter
from dflash_mlx.drafters.network import ConvolvedLayer, Network
from dflash_mlx.drafters.save import save_drafter
from dflash_mlx.drafters.selector import SelectorConfig
from dflash_mlx.train import maps, selector
from dflash_mlx.train.blocks import BlockSampler, RoundStartSampler, TextTokens
from dflash_mlx.train.data import Texts
from dflash_mlx.train.evaluate import Drafter, embed, measure
from dflash_mlx.train.maps import EmbeddingRows, MappedSelector, with_selector
from dflash_mlx.train.packed import hidden_states
from dflash_mlx.train.selector import SelectorTrainer, steps
from dflash_mlx.train.vocabulary import DraftVocabulary
from drafter_formats import SCALES
from families import VOCAB_SIZE
from tiny_training import (
    TAPS,
    WIDTH,
    drafter_config,
    greedy_rows,
    make_network,
    make_trainer,
    texts_of,
    tiny_target,
)

RAW = drafter_config(block_size=6)


def plain_drafter(seed: int = 0, **changes: Any) -> Drafter:
    """A random drafter of version 1."""
    return Drafter(*make_network({**RAW, **changes}, seed), tiny_target())


def trainer_of(drafter: Drafter, texts: Texts, **settings: Any) -> SelectorTrainer:
    given = {"rank": 16, "top_k": 97, "sequences": 2, "anchors": 8, "warmup": 5, "steps": 100}
    given = {**given, "draft_vocabulary": VOCAB_SIZE, "learning_rate": 0.005}
    config = SelectorTraining(**{**given, **settings})
    return SelectorTrainer(drafter, texts, config)


def weights_of(trainer: SelectorTrainer) -> dict[str, np.ndarray]:
    flat: Any = tree_flatten(trainer.maps.trainable_parameters())
    return {name: np.array(array) for name, array in flat}


def selected(trainer: SelectorTrainer, drafter: Drafter) -> Drafter:
    """The drafter with what was trained."""
    config = SelectorConfig(trainer.config.rank, trainer.config.top_k)
    return with_selector(drafter, RAW, trainer.maps, config)[0]


def rows_of(embedding: nn.Module) -> EmbeddingRows:
    return EmbeddingRows(embedding, VOCAB_SIZE)


# What it learns


class Noise:
    """Features that say nothing of the text that they are of."""

    def features(self, place: int) -> mx.array:
        rows = np.random.default_rng(place).normal(size=(60, len(TAPS) * WIDTH))
        return mx.array(rows.astype(np.float32))


def walks(count: int, first: int) -> Texts:
    """Texts in which every token is decided by the one before, and by nothing else."""
    order = np.random.default_rng(0).permutation(VOCAB_SIZE)
    after = dict(zip(order.tolist(), np.roll(order, -1).tolist(), strict=True))  # one cycle
    sequences, cache = [], Noise()
    for i in range(first, first + count):
        tokens = [i * 7 % VOCAB_SIZE]
        for _ in range(40):
            tokens.append(after[tokens[-1]])
        likely = np.array([[after[token]] for token in tokens])
        sequences.append(TextTokens(np.array(tokens), 4, likely, np.ones((41, 1))))
    places: Any = [(cache, i) for i in range(first, first + count)]
    rows = [Row(str(i), "", (), (), 0.0) for i in range(count)]
    return Texts("walks", sequences, rows, list(range(count)), places)


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


def laws_by_loops(trainer: SelectorTrainer) -> list[tuple[float, bool]]:
    """The probability of the right candidate at every position of the first step, or of all other
    tokens where it is none; and whether it is one."""
    blocks = trainer._sampler.blocks(0)
    states, before, tokens, logprobs, *_ = map(np.array, trainer._batch(blocks))
    assert np.array_equal(before, blocks.tokens[..., :-1].reshape(-1))
    edges = np.array(trainer.maps(*map(mx.array, (states, before, tokens))))
    result: list[tuple[float, bool]] = []
    for i, label in enumerate(blocks.labels[..., 1:].reshape(-1)):
        scores = logprobs[i].astype(np.float64) + edges[i]
        others = max(1 - np.exp(logprobs[i]).sum(), 1e-6)
        law = np.append(np.exp(scores), others) / (np.exp(scores).sum() + others)
        among = bool(label in tokens[i])
        result.append((law[tokens[i].tolist().index(label) if among else -1], among))
    return result


def weights_by_loops(drafter: Drafter, trainer: SelectorTrainer) -> list[float]:
    """Of the positions of the first step, 1 in all."""
    config, blocks = drafter.config, trainer._sampler.blocks(0)
    x = embed(drafter.target, config, blocks.inputs(config.mask_token_id))
    features = trainer._texts.features(blocks.rows, int(blocks.anchors.max()))
    states = hidden_states(drafter.network, config, features, mx.array(blocks.anchors), x)
    words = trainer.vocabulary.tokens
    chosen = words[np.array(drafter.logits(states))[..., words].argmax(axis=-1)]
    result = []
    for s, a in np.ndindex(blocks.anchors.shape):
        weight = 1.0
        for k in range(1, config.block_size):
            label = blocks.labels[s, a, k]
            known = blocks.supervised[s, a, k] and label in words
            result.append(weight * known)
            if chosen[s, a, k] != label:
                weight = 0.25
    return [weight / sum(result) for weight in result]


def loss_by_loops(laws: list[tuple[float, bool]], weights: list[float]) -> float:
    return -sum(w * np.log(c) for w, (c, _) in zip(weights, laws, strict=True))


@pytest.fixture(params=[VOCAB_SIZE, 40])
def mixed(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[SelectorTrainer, list[float]]:
    """A trainer, with the weights of its first step's positions.

    Some right tokens are not candidates, and with a small draft vocabulary not in that; a text
    was sampled; and the drafter has learned a little, so that some of its drafts are right.
    """
    rows = [*greedy_rows(3, 20), replace(greedy_rows(3, 20)[0], answer=tuple(range(9)))]
    texts = texts_of(tmp_path, rows)
    learner = make_trainer(texts, RAW, learning_rate=0.01)
    for _ in range(20):
        learner.train_step()
    drafter = Drafter(learner.network, learner.network_config, tiny_target())
    size = request.param
    trainer = trainer_of(drafter, texts, top_k=20, sequences=4, draft_vocabulary=size)
    outside = trainer.vocabulary.index[trainer._sampler.blocks(0).labels] < 0
    assert outside.any() == (size < VOCAB_SIZE)
    return trainer, weights_by_loops(drafter, trainer)


def test_the_loss_is_over_the_candidates_and_all_other_tokens_together(mixed):
    trainer, weights = mixed
    laws = laws_by_loops(trainer)
    assert 0.05 < np.mean([among for _, among in laws]) < 0.95
    shares = sorted(set(np.round(np.array(weights) / max(weights), 6)))
    assert shares == [0, 0.25, 1]  # not counted, behind a wrong draft, and up to it
    assert trainer.train_step(0.0) == pytest.approx(loss_by_loops(laws, weights), rel=1e-4)


def test_the_gradient_is_the_loss_s_slope(mixed):
    trainer, weights = mixed
    _, gradients = trainer._gradients(*trainer._batch(trainer._sampler.blocks(0)))
    for name, gradient in gradients.items():
        kept, ahead = trainer.maps[name], gradient / mx.linalg.norm(gradient)
        losses = []
        for step in (0.05, -0.05):
            trainer.maps[name] = kept + step * ahead
            losses.append(loss_by_loops(laws_by_loops(trainer), weights))
        trainer.maps[name] = kept
        slope = (losses[0] - losses[1]) / 0.1
        assert slope == pytest.approx(float(mx.linalg.norm(gradient)), rel=0.02)


def test_weights_fall_behind_the_first_wrong_draft():
    right = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    counted = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 1, 1, 1]], bool)
    expected = [[1, 1, 1, 0.25, 0], [1, 0.25, 0.25, 0.25, 0.25], [1, 0, 1, 1, 1]]
    assert selector.position_weights(right, counted).tolist() == expected


@pytest.mark.parametrize("size", [9, 40])
def test_candidates_are_the_likeliest_of_the_draft_vocabulary(tmp_path, size):
    texts = texts_of(tmp_path, greedy_rows(3, 20))
    trainer = trainer_of(plain_drafter(), texts, top_k=9, draft_vocabulary=size)
    blocks = trainer._sampler.blocks(0)
    states, _, tokens, logprobs, right, _ = map(np.array, trainer._batch(blocks))
    words = trainer.vocabulary.tokens
    logits = np.array(plain_drafter().logits(mx.array(states)))[:, words]
    law = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    best = np.argsort(-law, axis=-1)[:, :9]
    assert np.array_equal(tokens, words[best])
    assert np.abs(np.take_along_axis(law, best, axis=-1) - logprobs).max() < 1e-4
    assert np.array_equal(right, tokens == blocks.labels[..., 1:].reshape(-1, 1))


def test_the_anchors_follow_the_chosen_law():
    texts, found = walks(3, 0), {}
    unsure = [replace(t, shares=np.linspace(0, 1, 41)[:, None]) for t in texts.sequences]
    for law, sampler in (("even", BlockSampler), ("starts", RoundStartSampler)):
        trainer = trainer_of(plain_drafter(), replace(texts, sequences=unsure), anchor_law=law)
        expected = sampler(unsure, RAW["block_size"], (2, 8), 0)
        found[law] = trainer._sampler.blocks(1).anchors
        assert np.array_equal(found[law], expected.blocks(1).anchors)
    assert not np.array_equal(found["even"], found["starts"])


def test_a_step_without_a_right_candidate_changes_nothing_by_nan():
    drafter = plain_drafter()
    texts = walks(2, 0)
    outside = [replace(text, likely=text.likely + VOCAB_SIZE) for text in texts.sequences]
    trainer = trainer_of(drafter, replace(texts, sequences=outside))
    assert trainer.train_step(0.0) > 0
    assert all(np.isfinite(array).all() for array in weights_of(trainer).values())


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
