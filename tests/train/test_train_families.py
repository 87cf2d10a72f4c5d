"""Drafters of all families learn; what new ones start from; which cannot be trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import DecodeConfig, DFlashError, PairConfig, Session, load_pair
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.networks.files import quantize_network
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train import compare
from dflash_mlx.train.compare import ANCHORS, hits_at, measure, read_trainee
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Text, Texts
from dflash_mlx.train.eagle3 import EagleTrainee
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.verifier.model import Target
from support import masked_formats
from support.drafter_formats import loaded
from support.families import make_model
from support.masked_formats import ours as masked
from support.reference_dflash import write_drafter_folder
from support.reference_dflash2 import random_tensors, tiny_config
from support.reference_eagle3 import FORMATS
from support.tiny_training import (
    CONTEXT,
    assert_decoding_accepts_what_was_measured,
    corpus_rows,
    drafter_config,
    eagle_of,
    greedy_rows,
    make_trainee,
    masked_of,
    sampled_row,
    texts_of,
    tiny_target,
    trainer_of,
)

BLOCK = 8
KNOWN = greedy_rows(8, 30)


def greedy_texts(rows: Any) -> Texts:
    return Texts("greedy", [Text.by_itself(row, i) for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts_of(tmp_path_factory.mktemp("features"), KNOWN)


# Learning


def learn(trainee: Trainee, texts: Texts, **settings: Any) -> Trainee:
    list(trainer_of(trainee, texts, sequences=8, **settings).losses())
    return trainee


@pytest.fixture(scope="module")
def trained(texts: Texts) -> Trainee:
    """A DFlash drafter that knows eight answers."""
    return learn(make_trainee(), texts, steps=120, learning_rate=1e-2, warmup=10, anchors=16)


LEARNERS: dict[str, tuple[Callable[[], Trainee], dict[str, Any], float]] = {
    "eagle3": (
        lambda: eagle_of(6),
        {"steps": 60, "learning_rate": 1e-2, "warmup": 5, "anchors": 8, "short_share": 0.0},
        3,
    ),
    "specdiff": (
        lambda: masked_of(masked()),
        {"steps": 90, "learning_rate": 8e-3, "warmup": 10, "anchors": 16, "seed": 3},
        3,
    ),
    "dflash": (make_trainee, {}, 6),
}


@pytest.mark.parametrize("method", LEARNERS)
def test_a_drafter_learns_answers_by_heart_and_decoding_accepts_what_was_measured(
    texts, trained, tmp_path, monkeypatch, method
):
    monkeypatch.setattr(compare, "_CHUNK", 24)  # a text takes several passes
    make, settings, least = LEARNERS[method]
    known = greedy_texts(KNOWN) if method == "specdiff" else texts
    assert measure(make(), known).tokens_per_round < 1.5
    trainee = learn(make(), known, **settings) if settings else trained
    trainee.save(tmp_path)
    saved, target = read_trainee(tmp_path, tiny_target()), tiny_target()
    pair = Pair(target, None, (loaded(tmp_path, target),))
    drafter = make_drafter(pair, DecodeConfig(method, saved.config.block_size))
    assert_decoding_accepts_what_was_measured(saved, drafter, KNOWN, known, least)


@pytest.mark.parametrize("prefix", [0, 2, BLOCK - 2])
def test_a_measurement_is_of_anchors_evenly_spread_in_every_text(trained, tmp_path, prefix):
    rows = [*KNOWN[:3], *greedy_rows(12, 9, seed=1)[:6], sampled_row("s", KNOWN[4])]
    texts, expected = texts_of(tmp_path / "cache", rows), []  # more than one batch
    for i, text in enumerate(texts.texts):
        anchors = text.anchors[: max(1, len(text.anchors) - prefix)]
        spread = anchors[np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)]
        found = hits_at(trained, texts, np.array([i]), spread[None], prefix)[0]
        differs = text.likely[:-1, 0] != text.tokens[1:]
        for anchor, hits in zip(spread, found, strict=True):
            wrong = np.flatnonzero(differs[anchor + prefix : anchor + BLOCK - 1])
            assert not wrong.size or not hits[wrong[0] + 1 :].any(), "the text went another way"
        expected += [*found]
    found = measure(trained, texts, prefix)
    assert 0 < np.mean(expected) < 1 and np.array_equal(found.hits, expected)
    assert found.tokens_per_round == pytest.approx(1 + np.sum(expected, axis=-1).mean())
    assert found.by_position == pytest.approx(np.mean(expected, axis=0))


# What they start from


def pair_of(target: Target) -> Pair:
    return Pair(target, SimpleNamespace(mask_token_id=7))


def test_a_new_eagle_is_the_targets_last_layer_behind_its_last_tap():
    target = Target(make_model("smollm3"), 512, "four layers")
    trainee = EagleTrainee.new(TrainConfig(mode="eagle3", steps=1), pair_of(target))
    assert trainee.config.aux_layers == (1,) and trainee.config.num_target_layers == 4
    layer, own = target.model.layers[-1], trainee.network.midlayer
    d = trainee.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = getattr(layer.self_attn, name).weight
        matrix = getattr(own.self_attn, name).weight
        assert mx.array_equal(matrix[:, d:], theirs)
        assert 0 < mx.abs(matrix[:, :d]).max() < 0.2
    assert mx.array_equal(own.self_attn.o_proj.weight, layer.self_attn.o_proj.weight)
    assert mx.array_equal(own.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert mx.array_equal(own.hidden_norm.weight, layer.input_layernorm.weight)
    assert mx.array_equal(own.input_layernorm.weight, mx.ones(d))
    assert mx.array_equal(trainee.network.norm.weight, target.model.model.norm.weight)
    assert mx.array_equal(trainee.network.fc.weight[:, -d:], mx.eye(d))


def test_taps_of_a_new_eagle_are_the_usual_ones_or_as_many_as_asked_for():
    def aux_layers(layers: int, **settings: Any) -> Any:
        target = Target(make_model("llama", layers=layers), 512, "it")
        config = TrainConfig(mode="eagle3", steps=1, start="random", **settings)
        return EagleTrainee.new(config, pair_of(target)).config.aux_layers

    assert [aux_layers(layers) for layers in (3, 5, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 3, 4)]
    assert aux_layers(8, taps=2) == (1, 5) and aux_layers(8, taps=4) == (1, 2, 4, 5)
    with pytest.raises(DFlashError, match="taps is 2, but it has only 1 layers to read"):
        aux_layers(4, taps=2)


@pytest.mark.parametrize(("name", "layers"), [("llama", 3), ("qwen2", 2), ("qwen3", 2)])
def test_a_new_masked_drafter_is_layers_of_the_target_from_the_first_to_the_last(name, layers):
    target = Target(make_model(name), CONTEXT, name)
    config = TrainConfig(mode="specdiff", steps=1, layers=layers, block_size=5)
    trainee = SpecDiffTrainee.new(config, pair_of(target))
    assert (trainee.config.mask_token_id, trainee.config.block_size) == (7, 5)
    own = dict(tree_flatten(trainee.network.parameters()))
    for i, place in enumerate([0, 1, 2] if layers == 3 else [0, 2]):
        theirs = dict(tree_flatten(target.model.layers[place].parameters()))
        mine = {n.removeprefix(f"layers.{i}."): a for n, a in own.items() if f"layers.{i}." in n}
        assert mine.keys() == theirs.keys(), "norms of heads and biases where it has them"
        assert all(mx.array_equal(mine[key], theirs[key]) for key in mine)
    assert mx.array_equal(own["norm.weight"], target.model.model.norm.weight)


OTHERS = {**FORMATS, **masked_formats.FORMATS}
OTHERS["convolutions"] = tiny_config(), random_tensors(tiny_config())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("convolutions", "with convolutions"),
        ("packed", "quantised weights"),
        ("raw", "a head of its own"),
        ("raw, own embedding", "an embedding of its own and a head of its own"),
        ("a2d-qwen3", "an embedding of its own"),
        ("ours, shifted", "shifted logits"),
    ],
)
def test_drafters_that_cannot_be_trained_here_are_refused(tmp_path, name, said):
    if name == "packed":
        packed = make_trainee(drafter_config(intermediate_size=128))
        quantize_network(packed.network, 8)
        packed.save(tmp_path)
    else:
        write_drafter_folder(tmp_path, *OTHERS[name])
    with pytest.raises(DFlashError, match=f"{tmp_path} .*{said}") as failure:
        read_trainee(tmp_path, tiny_target())
    assert "in full precision" in failure.value.next_step


# Whole runs


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("eagle3", "LlamaForCausalLMEagle3"), ("specdiff", "MaskedDiffusionDraftModel")],
)
def test_a_run_is_resumed_and_compared_and_its_drafter_drafts(place, mode, kind, capsys):
    for steps in (2, 4):
        place.train(mode=mode, steps=steps, block_size=4)
    assert [record["step"] for record in place.history()] == [0, 2, 4]
    raw = json.loads((place.out / "config.json").read_text())
    assert raw["architectures"] == [kind] and raw["block_size"] == 4
    pair = load_pair(PairConfig(str(place.model), str(place.out)))
    prompt, answers = list(corpus_rows()[0].prompt), []
    for method in ("none", mode):
        session = Session(pair, DecodeConfig(method, max_tokens=12))
        answers.append([token for delta in session.stream(prompt) for token in delta.tokens])
    assert answers[0] == answers[1]
    again = place.root / "again"
    place.train(mode=mode, init=place.out, out=again, steps=1)
    both = ["--drafter", str(place.out), "--drafter", str(again), "--all-rows"]
    compare.main([*both, *place.data()])
    out = capsys.readouterr().out
    assert str(place.out) in out and str(again) in out
