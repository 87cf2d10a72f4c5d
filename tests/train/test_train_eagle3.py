"""EAGLE-3 is trained on what it will see when it drafts, and learns."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import DecodeConfig, DFlashError, PairConfig, Session, load_pair
from dflash_mlx.drafters.eagle3.drafter import Chain
from dflash_mlx.drafters.eagle3.model import EagleModel
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.system import cpu_math
from dflash_mlx.train.blocks import cut_blocks
from dflash_mlx.train.compare import measure, walk
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Texts
from dflash_mlx.train.eagle3 import EagleTrainee
from dflash_mlx.train.families import read_trainee
from dflash_mlx.train.trainer import Trainer
from dflash_mlx.verifier.model import Target
from support.families import VOCAB_SIZE, make_model
from support.reference_dflash import write_drafter_folder
from support.reference_eagle3 import FORMATS, ours
from support.tiny_training import (
    TAPS,
    corpus_rows,
    decoded,
    drafter_config,
    greedy_rows,
    random_drafter,
    sampled_row,
    texts_of,
    tiny_target,
)

IDS = "eagle_aux_hidden_state_layer_ids"
ANCHORS = np.array([[5, 9, 17], [12, 7, 29]])  # the last block passes the end of its text
KINDS = {
    "raw": {},
    "sliding": {"layer_types": ["sliding_attention"], "sliding_window": 4},
    "3.1": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}


def trainee_of(block_size: int = 5, seed: int = 0, **changes: Any) -> EagleTrainee:
    """With random weights that are no longer small."""
    raw = {**ours(**changes), "block_size": block_size, "eagle_config": {IDS: list(TAPS)}}
    trainee = EagleTrainee.fresh(raw, tiny_target(), seed)
    larger = [(n, a * 8 if a.ndim > 1 else a) for n, a in parameters_of(trainee.network).items()]
    trainee.network.load_weights(larger)
    return trainee


def model_of(trainee: EagleTrainee) -> EagleModel:
    return EagleModel(trainee.network, trainee.config, trainee.target)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    greedy, other = greedy_rows(2, 26)
    return texts_of(tmp_path_factory.mktemp("features"), [greedy, sampled_row("b", other)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 5])
def test_a_block_in_training_sees_what_a_draft_of_its_tokens_sees(texts, kind, size):
    trainee = trainee_of(**KINDS[kind])
    model = model_of(trainee)
    blocks = cut_blocks(texts.texts, np.array([0, 1]), ANCHORS, size, np.zeros((2, 3), int))
    states = trainee.states(*trainee.inputs(texts, blocks))
    assert states.shape == (2, 3, size, 64) and not states[:, :, 0].any()
    found = np.array(trainee.logits(states))
    for s, a in np.ndindex(2, 3):
        text, anchor = texts.texts[s], int(ANCHORS[s, a])
        features = texts.features([s], np.zeros(1, int), anchor)[0]
        context = model.new_context()
        context.append(mx.array(text.tokens[:anchor]), features)
        draft = model.begin(context)
        for step, token in enumerate(blocks.tokens[s, a, :-1].tolist()):
            expected = np.array(draft.logits(mx.array([token]), [step - 1])[0])
            assert np.abs(found[s, a, step + 1] - expected).max() < 1e-4


def test_no_later_token_of_a_text_reaches_a_state(texts):
    trainee, rows = trainee_of(), np.array([0, 1])
    given = rows, ANCHORS, 5, np.zeros((2, 3), int)
    before = trainee.states(*trainee.inputs(texts, cut_blocks(texts.texts, *given)))
    blocks = cut_blocks(texts.texts, *given)
    blocks.tokens[..., -1] += 1
    features, behind, anchors, x = trainee.inputs(texts, blocks)
    last = mx.max(anchors)
    features = mx.where(mx.arange(features.shape[1])[:, None] < last, features, 1e3)
    after = trainee.states(features, behind, anchors, x)
    assert mx.array_equal(before, after)
    first = trainee.states(features, behind, anchors, mx.where(mx.arange(4)[:, None] < 2, x, 7.0))
    assert mx.array_equal(before[:, :, :3], first[:, :, :3])
    assert not mx.array_equal(before[:, :, 3:], first[:, :, 3:])


def make_trainer(trainee: EagleTrainee, texts: Texts, **settings: Any) -> Trainer:
    given = {"steps": 10, "sequences": 2, "anchors": 4, "draft_vocabulary": VOCAB_SIZE, "warmup": 2}
    return Trainer(trainee, texts, TrainConfig(**{"mode": "eagle3", **given, **settings}))


@pytest.mark.parametrize("kind", ["raw", "3.1"])
def test_gradients_are_the_slopes_of_the_loss_through_all_steps(texts, kind, monkeypatch):
    trainer = make_trainer(trainee_of(**KINDS[kind]), texts, loss="decay", soft=0.5)
    network = trainer.trainee.network
    blocks = cut_blocks(texts.texts, np.array([0, 1]), ANCHORS, 5, np.zeros((2, 3), int))
    batch = trainer.batch(blocks)
    value, gradients = trainer._gradients(batch)
    found = dict(tree_flatten(gradients))
    assert found.keys() == parameters_of(network).keys()
    for name, gradient in found.items():
        own, step = parameters_of(network)[name], 1e-3 * gradient / mx.linalg.norm(gradient)
        losses = []
        for sign in (1, -1):
            network.load_weights([(name, own + sign * step)], strict=False)
            losses.append(float(trainer._loss(batch)))
        network.load_weights([(name, own)], strict=False)
        expected = 2e-3 * float(mx.linalg.norm(gradient))
        assert losses[0] - losses[1] == pytest.approx(expected, rel=0.05, abs=2e-6), name
    monkeypatch.setattr(cpu_math, "applies", lambda: False)
    other, natively = trainer._gradients(batch)
    assert abs(float(value) - float(other)) < 1e-5
    for name, gradient in tree_flatten(natively):
        assert mx.abs(gradient - found[name]).max() < 1e-4 * mx.abs(gradient).max(), name


def test_it_learns_answers_by_heart_and_decoding_accepts_what_was_measured(tmp_path):
    known = greedy_rows(8, 24)
    texts = texts_of(tmp_path / "features", known)
    trainee = trainee_of(6)
    assert measure(trainee, texts).tokens_per_round < 1.5
    shape = {"sequences": 8, "anchors": 8, "short_share": 0.0}
    trainer = make_trainer(trainee, texts, steps=120, learning_rate=8e-3, warmup=5, **shape)
    list(trainer.losses())
    assert measure(trainee, texts).tokens_per_round > 3.5
    trainee.save(tmp_path / "drafter")
    saved = read_trainee(tmp_path / "drafter", tiny_target())
    assert isinstance(saved, EagleTrainee) and saved.config.aux_layers == TAPS
    drafter = Chain(model_of(saved))
    answers = [decoded(tiny_target(), drafter, row) for row in known]
    assert [sum(rounds, ()) for rounds in answers] == [row.answer for row in known]
    lengths = [len(tokens) for _, *rounds in answers for tokens in rounds]
    walked = 1 + walk(saved, texts).hits.sum(axis=-1)
    over = walked - lengths  # a walk counts the token behind an answer's last one
    assert over.min() == 0 and over.max() <= 1 and np.mean(lengths) > 3


# What it starts from


def pair_of(target: Target) -> Pair:
    return Pair(target, None)


def test_a_new_drafter_is_the_targets_last_layer_behind_its_last_tap():
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
    other = EagleTrainee.new(TrainConfig(mode="eagle3", steps=1, start="random"), pair_of(target))
    assert mx.abs(other.network.fc.weight).max() < 0.2


def test_taps_of_a_new_drafter_are_the_usual_ones_or_as_many_as_asked_for():
    def aux_layers(layers: int, **settings: Any) -> Any:
        target = Target(make_model("llama", layers=layers), 512, "it")
        config = TrainConfig(mode="eagle3", steps=1, start="random", **settings)
        return EagleTrainee.new(config, pair_of(target)).config.aux_layers

    assert [aux_layers(layers) for layers in (3, 4, 5, 6)] == [(1,), (1,), (1, 2), (1, 2, 3)]
    assert aux_layers(7) == (1, 2, 3) and aux_layers(8) == (1, 3, 4)
    assert aux_layers(8, taps=2) == (1, 5) and aux_layers(8, taps=4) == (1, 2, 4, 5)
    # what drafters of another family read by default
    assert aux_layers(8, taps=5) == (1, 2, 3, 4, 5)
    with pytest.raises(DFlashError, match="taps is 2, but it has only 1 layers to read"):
        aux_layers(4, taps=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layers": 2}, "layers is 2, but an EAGLE-3 drafter has one"),
        ({"layers": 3}, "layers is 3, but an EAGLE-3 drafter has one"),
        ({"start": "target"}, "the layers of starcoder2 are not built like a drafter's"),
    ],
)
def test_what_cannot_be_started_is_refused(settings, said):
    family = "starcoder2" if "start" in settings else "llama"
    target = Target(make_model(family), 512, family)
    if family == "starcoder2":
        target.model.args.rms_norm_eps = 1e-6
    with pytest.raises(DFlashError, match=said):
        EagleTrainee.new(TrainConfig(mode="eagle3", steps=1, **settings), pair_of(target))


@pytest.mark.parametrize("name", ["raw", "raw, own embedding"])
def test_a_drafter_with_a_head_of_its_own_is_not_trained(tmp_path, name):
    folder = write_drafter_folder(tmp_path, *FORMATS[name])
    with pytest.raises(DFlashError, match="a head of its own"):
        read_trainee(folder, tiny_target())


# A whole run


def test_a_run_is_resumed_and_its_drafter_drafts(place, capsys):
    place.train(mode="eagle3", layers=None, steps=3, block_size=4)
    place.train(mode="eagle3", layers=None, steps=6, block_size=4)
    history = place.history()
    assert [record["step"] for record in history][-1] == 6
    raw = json.loads((place.out / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["block_size"] == 4
    pair = load_pair(PairConfig(str(place.model), str(place.out)))
    prompt, answers = list(corpus_rows()[0].prompt), []
    for method in ("none", "eagle3"):
        session = Session(pair, DecodeConfig(method, max_tokens=12))
        answers.append([token for delta in session.stream(prompt) for token in delta.tokens])
    assert answers[0] == answers[1]


def test_a_run_starts_from_no_drafter_of_another_family(place):
    raw = drafter_config()
    folder = write_drafter_folder(place.root / "dflash", raw, random_drafter(raw))
    with pytest.raises(DFlashError, match="'DFlashDraftModel', supported are LlamaForCausalLMEag"):
        place.train(mode="eagle3", layers=None, init=folder)
