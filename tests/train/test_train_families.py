"""EAGLE-3 and masked diffusion drafters are trained on what they see when they draft, and learn."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import DecodeConfig, DFlashError, PairConfig, Session, load_pair
from dflash_mlx.drafters.eagle3.drafter import Chain
from dflash_mlx.drafters.eagle3.model import EagleModel
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.networks.files import parameters_of, quantize_network
from dflash_mlx.engine.pair import Pair
from dflash_mlx.system import cpu_math
from dflash_mlx.train import compare
from dflash_mlx.train.blocks import Blocks, BlockSampler, cut_blocks
from dflash_mlx.train.compare import measure, read_trainee
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Text, Texts
from dflash_mlx.train.eagle3 import EagleTrainee
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee
from dflash_mlx.train.trainer import Trainer
from dflash_mlx.verifier.model import Target
from support import masked_formats
from support.drafter_formats import loaded
from support.families import VOCAB_SIZE, make_model
from support.masked_formats import SLIDING, tensors
from support.masked_formats import ours as masked
from support.reference_dflash import write_drafter_folder
from support.reference_dflash2 import random_tensors, tiny_config
from support.reference_eagle3 import FORMATS
from support.reference_eagle3 import ours as eagle
from support.tiny_training import (
    CONTEXT,
    TAPS,
    assert_decoding_accepts_what_was_measured,
    corpus_rows,
    drafter_config,
    greedy_rows,
    make_trainee,
    sampled_row,
    texts_of,
    tiny_target,
)

IDS = "eagle_aux_hidden_state_layer_ids"
ANCHORS = np.array([[5, 9, 17], [12, 7, 29]])  # the last block passes the end of its text
BLOCK = 5
EAGLES: dict[str, dict[str, Any]] = {
    "raw": {},
    "sliding": {"layer_types": ["sliding_attention"], "sliding_window": 4},
    "3.1": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
MASKED = {
    "ours": masked(),
    "head norms and biases": masked(head_norms=True, attention_bias=True),
    "sliding": masked(**SLIDING),
    "all sliding": masked(**ALL_SLIDING),
    "shorter than the block": masked(**{**ALL_SLIDING, "sliding_window": 2}),
    "one key for all heads": masked(num_key_value_heads=1, final_logit_softcapping=3.0),
}


def eagle_of(block_size: int = BLOCK, **changes: Any) -> EagleTrainee:
    """With random weights that are no longer small."""
    raw = {**eagle(**changes), "block_size": block_size, "eagle_config": {IDS: list(TAPS)}}
    trainee = EagleTrainee.fresh(raw, tiny_target(), 0)
    larger = [(n, a * 8 if a.ndim > 1 else a) for n, a in parameters_of(trainee.network).items()]
    trainee.network.load_weights(larger)
    return trainee


def masked_of(raw: dict[str, Any]) -> SpecDiffTrainee:
    trainee = SpecDiffTrainee.of(raw, tiny_target())
    trainee.network.load_weights([(n, mx.array(t)) for n, t in tensors(raw, 0).items()])
    return trainee


def greedy_texts(rows: Any) -> Texts:
    return Texts("greedy", [Text.by_itself(row, i) for i, row in enumerate(rows)])


def blocks_of(texts: Texts, size: int = BLOCK) -> Blocks:
    return cut_blocks(texts.texts, np.array([0, 1]), ANCHORS, size, np.zeros((2, 3), int))


def showing(blocks: Blocks) -> Blocks:
    """Some of their tokens, in all places."""
    shown = np.random.default_rng(0).random(blocks.tokens.shape) < 0.3
    return replace(blocks, revealed=shown, supervised=blocks.supervised & ~shown)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    greedy, other = greedy_rows(2, 26)
    return texts_of(tmp_path_factory.mktemp("features"), [greedy, sampled_row("b", other)])


# What a block sees


@pytest.mark.parametrize("kind", EAGLES)
def test_a_block_of_eagle_sees_what_a_draft_of_its_tokens_sees(texts, kind):
    trainee = eagle_of(**EAGLES[kind])
    model = EagleModel(trainee.network, trainee.config, trainee.target)
    blocks = blocks_of(texts)
    states = trainee.states(*trainee.inputs(texts, blocks))
    assert states.shape == (2, 3, BLOCK, 64) and not states[:, :, 0].any()
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


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_block_has_the_logits_that_it_has_when_it_is_drafted(name):
    raw, trainee, texts = MASKED[name], masked_of(MASKED[name]), greedy_texts(greedy_rows(2, 26))
    blocks = showing(blocks_of(texts, raw["block_size"]))
    states = trainee.states(*trainee.inputs(texts, blocks))
    found = np.array(trainee.logits(states))[:, :, 1:]
    table = np.array(tiny_target().embedding().weight)
    shown = blocks.inputs(raw["mask_token_id"])
    for s, a in np.ndindex(blocks.anchors.shape):
        text = texts.texts[s].tokens[: blocks.anchors[s, a]].tolist()
        given = raw, tensors(raw), (table, table), text, shown[s, a]
        assert np.abs(found[s, a] - masked_formats.logits(*given)).max() < 1e-4


def trainer_of(trainee: Trainee, texts: Texts, **settings: Any) -> Trainer:
    mode = "eagle3" if isinstance(trainee, EagleTrainee) else "specdiff"
    given = {"steps": 10, "sequences": 2, "anchors": 4, "draft_vocabulary": VOCAB_SIZE, "warmup": 2}
    return Trainer(trainee, texts, TrainConfig(**{"mode": mode, **given, **settings}))


@pytest.mark.parametrize("name", ["raw", "3.1", "ours", "head norms and biases", "sliding masked"])
def test_gradients_are_the_slopes_of_the_loss_through_all_steps_and_texts(texts, name, monkeypatch):
    if name in EAGLES:
        trainee, blocks = eagle_of(**EAGLES[name]), blocks_of(texts)
    else:
        trainee = masked_of(MASKED[name.removesuffix(" masked")])
        blocks = showing(blocks_of(texts))
    trainer = trainer_of(trainee, texts, loss="decay", soft=0.5)
    network, batch = trainer.trainee.network, trainer.batch(blocks)
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
        assert losses[0] - losses[1] == pytest.approx(expected, rel=0.02, abs=2e-6), name
    monkeypatch.setattr(cpu_math, "applies", lambda: False)
    other, natively = trainer._gradients(batch)
    assert abs(float(value) - float(other)) < 1e-5
    for name, gradient in tree_flatten(natively):
        assert mx.abs(gradient - found[name]).max() < 1e-4 * mx.abs(gradient).max(), name


def test_some_masked_blocks_show_tokens_that_teach_nothing_and_the_others_none(texts):
    sampler = BlockSampler(texts.texts, 8, (2, 40), seed=1, reveal_share=0.5)
    seen = [sampler.blocks(step) for step in range(6)]
    shown = np.concatenate([blocks.revealed[:, :, 1:].reshape(-1, 7) for blocks in seen])
    assert 0.3 < shown.any(axis=-1).mean() < 0.55, "half, some of which happen to show none"
    assert 0.15 < shown.mean() < 0.35
    for blocks in seen:
        assert not (blocks.supervised & blocks.revealed).any()
        inputs = blocks.inputs(96)
        assert (inputs == blocks.tokens)[blocks.revealed].all()
        assert (inputs[..., 1:] == 96)[~blocks.revealed[..., 1:]].all()
        lengths = np.array([len(texts.texts[row].tokens) for row in blocks.rows])
        outside = blocks.anchors[..., None] + np.arange(8) >= lengths[:, None, None]
        assert not blocks.revealed[outside].any() and (inputs[outside] == 96).all()


# Learning


def test_eagle_learns_answers_by_heart_and_decoding_accepts_what_was_measured(tmp_path):
    known = greedy_rows(8, 24)
    texts, trainee = texts_of(tmp_path / "features", known), eagle_of(6)
    assert measure(trainee, texts).tokens_per_round < 1.5
    shape = {"sequences": 8, "anchors": 8, "short_share": 0.0}
    list(trainer_of(trainee, texts, steps=60, learning_rate=1e-2, warmup=5, **shape).losses())
    trainee.save(tmp_path / "drafter")
    saved = read_trainee(tmp_path / "drafter", tiny_target())
    assert isinstance(saved, EagleTrainee) and saved.config.aux_layers == TAPS
    drafter = Chain(EagleModel(saved.network, saved.config, saved.target))
    assert_decoding_accepts_what_was_measured(saved, drafter, known, texts, 3)


def test_a_masked_drafter_learns_answers_by_heart_and_decoding_accepts_what_was_measured(tmp_path):
    known = greedy_rows(8, 30)
    texts, trainee = greedy_texts(known), masked_of(masked())
    assert measure(trainee, texts).tokens_per_round < 1.5
    settings = {"sequences": 8, "anchors": 16, "warmup": 10, "steps": 90, "learning_rate": 8e-3}
    list(trainer_of(trainee, texts, seed=3, **settings).losses())
    trainee.save(tmp_path)
    saved, target = SpecDiffTrainee.read(tmp_path, tiny_target()), tiny_target()
    pair = Pair(target, None, (loaded(tmp_path, target),))
    drafter = make_drafter(pair, DecodeConfig("specdiff", saved.config.block_size))
    assert_decoding_accepts_what_was_measured(saved, drafter, known, texts, 3)


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
