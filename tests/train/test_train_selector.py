"""A selector in training: what it learns, and `python -m dflash_mlx.train.selector`."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx import load
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import SelectedPath
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.network import ConvolvedLayer, Network
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.train import selector
from dflash_mlx.train.acceptance import measure
from dflash_mlx.train.blocks import SAMPLERS
from dflash_mlx.train.config import SelectorTraining
from dflash_mlx.train.data import Texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.selector import MappedSelector, SelectorTrainer, with_selector
from support.decoding import feed
from support.drafter_formats import speculators
from support.families import VOCAB_SIZE
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash2 import random_tensors, tiny_config
from support.tiny_training import (
    TAPS,
    WIDTH,
    Place,
    arrays_of,
    corpus_rows,
    decoded,
    drafter_config,
    files,
    greedy_rows,
    make_trainee,
    make_trainer,
    texts_of,
    tiny_target,
    walk,
)

RAW = drafter_config(block_size=6)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Three greedy answers, and one that nobody would call so."""
    rows = [*greedy_rows(3, 20), replace(greedy_rows(3, 20)[0], answer=tuple(range(9)))]
    return texts_of(tmp_path_factory.mktemp("features"), rows)


def trainer_of(trainee: DFlashTrainee, texts: Texts, **settings: Any) -> SelectorTrainer:
    given = {"rank": 16, "top_k": 97, "sequences": 2, "anchors": 8, "warmup": 5, "steps": 100}
    given = {**given, "draft_vocabulary": VOCAB_SIZE, "learning_rate": 0.005}
    return SelectorTrainer(trainee, texts, SelectorTraining(**{**given, **settings}))


def maps_of(embedding: nn.Module, rank: int = 8) -> MappedSelector:
    return MappedSelector(embedding, VOCAB_SIZE, rank, seed=1)


def test_the_drafter_stays_as_it_is_and_the_maps_depend_on_the_seed_alone(texts):
    drafter = make_trainee(RAW)
    before, embedding = arrays_of(drafter.network), np.array(drafter.target.embedding().weight)
    runs = [trainer_of(drafter, texts, seed=seed) for seed in (3, 3, 4)]
    for _ in range(2):
        first, again, other = (arrays_of(trainer.maps) for trainer in runs)
        assert first.keys() == {"hidden", "predecessor", "successor"}
        for name, array in first.items():
            assert array.tobytes() == again[name].tobytes()
            assert not np.array_equal(array, other[name])
        for trainer in runs:
            list(itertools.islice(trainer.losses(), 4))
    after = arrays_of(drafter.network)
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    assert np.array_equal(drafter.target.embedding().weight, embedding)
    anchors = [trainer._sampler.blocks(0).anchors for trainer in runs]
    assert not np.array_equal(anchors[0], anchors[2])
    by_starts = trainer_of(drafter, texts, anchor_law="starts")
    assert type(by_starts._sampler) is SAMPLERS["starts"]


# The loss


@pytest.mark.parametrize("mode", ["dflash", "variable-prefix"])
def test_the_loss_is_over_the_candidates_and_all_other_tokens_together(texts, mode):
    """Some right tokens are not candidates, and with a small draft vocabulary not in that; a text
    was sampled; and the drafter has learned a little, so that some of its drafts are right."""
    learner = make_trainer(texts, deepcopy(RAW), steps=20, learning_rate=0.01)
    list(learner.losses())
    trainee = learner.trainee.prepared(mode)
    trainer = trainer_of(trainee, texts, top_k=20, sequences=4, draft_vocabulary=40)
    blocks, words = trainer._sampler.blocks(0), trainer.vocabulary.tokens
    assert blocks.prefixes.any() == (mode == "variable-prefix")
    states, *batch = trainer.batch(blocks)
    edges = np.array(trainer.maps(states, *batch[:2])).reshape(*blocks.anchors.shape, 5, 20)
    shape = *blocks.anchors.shape, 5, -1
    before, tokens, logprobs, right, _ = (np.array(array).reshape(shape) for array in batch)
    logits = np.array(trainee.logits(states))[:, words].reshape(shape)
    law = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    best = np.argsort(-law, axis=-1)[..., :20]
    assert np.array_equal(tokens, words[best]), "the likeliest of the draft vocabulary"
    assert np.abs(np.take_along_axis(law, best, axis=-1) - logprobs).max() < 1e-4
    assert np.array_equal(right, tokens == blocks.labels[..., 1:, None])
    assert np.array_equal(before[..., 0], blocks.tokens[..., :-1])
    losses, weights = [], []
    for s, a in np.ndindex(blocks.anchors.shape):
        weight = 1.0
        for k, label in enumerate(blocks.labels[s, a, 1:]):
            places = np.flatnonzero(right[s, a, k])
            plain = np.exp(logprobs[s, a, k].astype(np.float64))
            law = np.append(plain * np.exp(edges[s, a, k]), max(1 - plain.sum(), 1e-6))
            losses.append(-np.log(law[places[0] if places.size else -1] / law.sum()))
            weights.append(weight * (blocks.supervised[s, a, k + 1] and label in words))
            if tokens[s, a, k, 0] != label and k >= blocks.prefixes[s, a]:  # the likeliest is first
                weight = 0.25
    assert set(weights) == {0, 0.25, 1} and (trainer.vocabulary.index[blocks.labels] < 0).any()
    assert 0.05 < right.any(axis=-1).mean() < 0.95
    assert trainer.train_step() == pytest.approx(np.average(losses, weights=weights), rel=1e-4)


def test_a_step_in_which_nothing_counts_leaves_finite_weights(texts):
    settings = {"top_k": 5, "draft_vocabulary": 10}
    vocabulary = trainer_of(make_trainee(RAW), texts, **settings).vocabulary
    absent = np.flatnonzero(vocabulary.index < 0)[0]
    unknown = [replace(text, likely=np.full_like(text.likely, absent)) for text in texts.texts]
    trainer = trainer_of(make_trainee(RAW), replace(texts, texts=unknown), **settings)
    assert trainer.train_step() == 0
    assert all(np.isfinite(array).all() for array in arrays_of(trainer.maps).values())


def test_codebooks_give_the_edges_that_the_maps_give(monkeypatch):
    monkeypatch.setattr(selector, "_ROWS", 20)
    made = maps_of(tiny_target().embedding())
    written = made.selector(5)
    rng = np.random.default_rng(0)
    hidden = mx.array(rng.normal(size=(40, WIDTH)).astype(np.float32))
    before, tokens = (mx.array(rng.integers(VOCAB_SIZE, size=s)) for s in ((40,), (40, 5)))
    before[0], tokens[0, 0] = VOCAB_SIZE - 1, VOCAB_SIZE - 1
    expected = np.array(made(hidden, before, tokens))
    found = np.array(written.edges(hidden, before[:, None], tokens)[:, 0])
    assert np.abs(found - expected).max() < 1e-4 < np.abs(expected).max()


def block_logits(network: Network, drafter: DFlashTrainee) -> np.ndarray:
    model = BlockModel(network, drafter.config, tiny_target())
    context = model.new_context()
    rows = np.random.default_rng(0).normal(size=(16, len(TAPS) * WIDTH))
    feed(context, mx.array(rows.astype(np.float32)))
    return np.array(model.logits(context, mx.array([7]), drafter.config.block_size, [(), (3,)]))


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@pytest.mark.parametrize("changes", [SLIDING, {"is_causal": True}], ids=str)
def test_a_saved_folder_is_the_drafter_that_it_was_but_for_its_selector(tmp_path, changes):
    raw = drafter_config(note="mine", dflash_config={"output_multiplier": 0.5}, **changes)
    drafter = make_trainee(raw)
    drafter.network.set_dtype(mx.bfloat16)  # what a folder keeps
    drafter.network.set_dtype(mx.float32)
    both = with_selector(drafter, maps_of(tiny_target().embedding()), 5)
    both.save(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {**both.raw, "dtype": "bfloat16"} and written["note"] == "mine"
    assert "block_size" not in written
    config = FILES.read_drafter(tmp_path).config
    assert (config.selector_rank, config.selector_top_k, config.conv_kernel_size) == (8, 5, 1)
    assert both.without_selector().config == drafter.config
    network = FILES.load_network(tmp_path, config, mx.float32)
    assert not any(isinstance(layer, ConvolvedLayer) for layer in network.layers)
    full = FILES.read_drafter(tmp_path).network()  # as another program would make it
    full.set_dtype(mx.float32)
    assert all(isinstance(layer, ConvolvedLayer) for layer in full.layers)
    expected = block_logits(drafter.network, drafter)
    assert np.array_equal(block_logits(network, drafter), expected)
    assert np.array_equal(block_logits(full, drafter), expected)


# The command


def run(place: Place, **options: Any) -> None:
    given = {"drafter": place.root / "drafter", "layers": None, "rank": 16}
    given = {**given, "top_k": 97, "draft_vocabulary": 97}
    selector.main(place.words(**{**given, **options}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Place:
    """A folder that the command made from a random drafter and two answers."""
    place = Place(tmp_path_factory.mktemp("place"), tiny_model)
    make_trainee(RAW).save(place.root / "drafter")
    run(place, steps=100, learning_rate=0.015, warmup=5, anchors=16, sequences=4)
    return place


def figures(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "tokens/round" in line]


def test_the_command_prints_both_figures_and_writes_a_folder(place, capsys):
    place.drafter(block_size=6, dflash_config={"training_mode": "vp_drafter"})
    given = files(place.root / "drafter")
    run(place, top_k=16, draft_vocabulary=None)
    printed = capsys.readouterr().err
    assert printed.count("the draft vocabulary covers") == 1
    without, with_one = figures(printed)
    assert without.startswith("without a selector: ") and with_one.startswith("with one: ")
    for line in (without, with_one):
        assert "| by position " in line
        assert len(line.partition("| continuation by prefix ")[2].split()) == 5
    assert set(files(place.out)) == {"config.json", "model.safetensors"}
    assert files(place.root / "drafter") == given


def test_a_trained_folder_accepts_more_than_the_drafter_it_was(trained, tmp_path):
    rows = [row for row in corpus_rows() if row.temperature == 0]
    texts, target = texts_of(tmp_path, rows), tiny_target()
    folders = trained.root / "drafter", trained.out
    before, drafter = (DFlashTrainee.read(folder, target) for folder in folders)
    first, second = (measure(each, texts).sum(axis=-1).mean() for each in (before, drafter))
    assert first < 0.5 and second > first + 0.5
    for prefix in range(4):  # what is drafted first behind one depends on its last token
        assert measure(drafter, texts, prefix)[:, 0].mean() > 0.4


def test_decoding_accepts_what_was_measured(trained, tmp_path):
    rows = [row for row in corpus_rows() if row.temperature == 0]
    pair = load(str(trained.model), str(trained.out))
    config = pair.drafters[0].config
    assert (config.selector_rank, config.selector_top_k, config.block_size) == (16, 97, 6)
    drafter = make_drafter(pair, DecodeConfig("dflash", 6))
    assert isinstance(drafter, SelectedPath)
    answers = [decoded(pair.target, drafter, row) for row in rows]
    assert [tuple(sum(map(list, rounds), [])) for rounds in answers] == [r.answer for r in rows]
    walked = walk(DFlashTrainee.read(trained.out, tiny_target()), texts_of(tmp_path, rows))
    lengths: list[int] = []
    for (_, *rounds), hits, row in zip(answers, walked, rows, strict=True):
        left = len(row.answer) - 1
        for tokens, hit in zip(rounds, hits, strict=False):  # the ends may differ, see below
            if left < config.block_size:
                break  # the last rounds draft shorter blocks
            assert len(tokens) == 1 + hit.sum()
            lengths.append(len(tokens))
            left -= len(tokens)
    assert len(set(lengths)) > 2, "rounds of many lengths, so that a mistake would be seen"


def test_a_second_run_begins_with_the_drafter_alone(trained, tmp_path, capsys):
    """A selector that is there is left out, and the new one is as if it had not been."""
    options = {"top_k": 8, "rank": 4, "steps": 3, "held_out": 2}  # some of which were learned
    run(trained, out=tmp_path / "once", **options)
    once = capsys.readouterr().err
    run(trained, drafter=trained.out, out=tmp_path / "again", **options)
    again = capsys.readouterr().err
    assert figures(once) == figures(again) and len(figures(once)) == 2
    first, second = files(tmp_path / "once"), files(tmp_path / "again")
    assert first["model.safetensors"] == second["model.safetensors"]
    trained.train(init=trained.out, out=tmp_path / "first", layers=None, steps=1)
    assert FILES.read_drafter(tmp_path / "first").config.selector_rank == 0


def test_a_drafter_with_a_field_of_its_target_gets_a_selector(place):
    place.drafter(kv_lora_rank=512)  # which its tensors contradict
    run(place, steps=1)
    assert FILES.read_drafter(place.out).config.selector_rank


def test_nvidia_s_second_version_is_read_again_as_the_first_that_it_was_trained_as():
    maps = maps_of(tiny_target().embedding())
    both = with_selector(make_trainee(drafter_config()), maps, 5)
    both.raw["dflash_config"]["projector_type"] = "dflash2"
    assert FILES.parse_config(both.raw, "it").selector_rank
    assert FILES.parse_config(both.without_selector().raw, "it").selector_rank == 0


def test_a_drafter_of_speculators_gets_a_selector(place, tiny_model):
    write_drafter_folder(place.root / "drafter", speculators(), random_drafter(RAW))
    run(place)
    assert load(str(tiny_model), str(place.out)).drafters[0].config.selector_rank


BAD = [
    ("top_k", "98", "top_k is 98; .* 97 tokens"),
    ("draft_vocabulary", "96", "top_k is 97; .* 96 tokens"),
    ("out", "corpus.jsonl", "already exists"),
    ("drafter", "convolved", "convolutions"),
]


@pytest.mark.parametrize(("name", "value", "named"), BAD)
def test_bad_settings_are_refused_and_nothing_is_written(place, monkeypatch, name, value, named):
    monkeypatch.chdir(place.root)
    place.drafter()
    raw = tiny_config()
    write_drafter_folder(place.root / "convolved", raw, random_tensors(raw))
    before = files(place.root)
    with pytest.raises(DFlashError, match=named) as failure:
        run(place, **{name: value})
    assert failure.value.next_step
    assert files(place.root) == before and not place.out.exists()
