"""Masked diffusion drafters are trained on what they see when they draft, and learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.train import compare
from dflash_mlx.train.blocks import Blocks, BlockSampler, cut_blocks
from dflash_mlx.train.compare import measure, walk
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Text, Texts
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainer import Trainer
from dflash_mlx.verifier.model import Target
from support import masked_formats
from support.families import VOCAB_SIZE, make_model
from support.masked_formats import FORMATS, SLIDING, ours, tensors
from support.reference_dflash import write_drafter_folder
from support.tiny_training import CONTEXT, decoded, files, greedy_rows, tiny_target

BLOCK = 6
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
CONFIGS = {
    "ours": ours(),
    "head norms and biases": ours(head_norms=True, attention_bias=True),
    "sliding": ours(**SLIDING),
    "all sliding": ours(**ALL_SLIDING),
    "shorter than the block": ours(**{**ALL_SLIDING, "sliding_window": 2}),
    "one key for all heads": ours(num_key_value_heads=1, final_logit_softcapping=3.0),
}
ANCHORS = np.array([[5, 9, 17], [12, 7, 29]])  # the last block passes the end of its text
SHOWN = np.random.default_rng(0).random((2, 3, BLOCK)) < 0.3


def texts_of(rows: Any) -> Texts:
    return Texts("greedy", [Text.by_itself(row, i) for i, row in enumerate(rows)])


def trainee_of(raw: dict[str, Any], seed: int = 0) -> SpecDiffTrainee:
    trainee = SpecDiffTrainee.of(raw, tiny_target())
    trainee.network.load_weights([(n, mx.array(t)) for n, t in tensors(raw, seed).items()])
    return trainee


@pytest.fixture(scope="module")
def texts() -> Texts:
    return texts_of(greedy_rows(2, 26))


@pytest.fixture(scope="module")
def blocks(texts: Texts) -> Blocks:
    """Blocks that show some of their tokens, in all places."""
    cut = cut_blocks(texts.texts, np.arange(2), ANCHORS, BLOCK, np.zeros((2, 3), int))
    return replace(cut, revealed=SHOWN, supervised=cut.supervised & ~SHOWN)


def reference(raw, stored, texts: Texts, blocks: Blocks) -> np.ndarray:
    """[S, A, B - 1, V] logits as a drafter has them behind the text, in NumPy."""
    table = np.array(tiny_target().embedding().weight)
    shown = blocks.inputs(raw["mask_token_id"])
    result = np.zeros((*shown.shape[:2], BLOCK - 1, VOCAB_SIZE))
    for s, a in np.ndindex(blocks.anchors.shape):
        text = texts.texts[s].tokens[: blocks.anchors[s, a]].tolist()
        result[s, a] = masked_formats.logits(raw, stored, (table, table), text, shown[s, a])
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_have_the_logits_that_they_have_when_they_are_drafted(texts, blocks, name):
    raw, trainee = CONFIGS[name], trainee_of(CONFIGS[name])
    states = trainee.states(*trainee.inputs(texts, blocks))
    found = np.array(trainee.logits(states))[:, :, 1:]
    assert np.abs(found - reference(raw, tensors(raw), texts, blocks)).max() < 1e-4


@pytest.mark.parametrize("name", ["ours", "head norms and biases", "sliding"])
def test_gradients_go_through_blocks_and_texts(texts, blocks, name):
    """Loss and slopes are NumPy's, at the entry of every tensor with the largest gradient."""
    raw, step = CONFIGS[name], 1e-4
    settings = {"loss": "decay", "soft": 0.0, "draft_vocabulary": VOCAB_SIZE, "steps": 1}
    trainer = Trainer(trainee_of(raw), texts, TrainConfig(mode="specdiff", **settings))
    batch = trainer.batch(blocks)
    loss, gradients = nn.value_and_grad(trainer.trainee.network, trainer._loss)(batch)
    stored = {name: array.astype(np.float64) for name, array in tensors(raw).items()}
    trained, places = blocks.supervised[..., 1:], np.arange(BLOCK - 1)
    weights = np.exp(-places / trainer.config.tau) * trained

    def expected() -> float:
        logits = reference(raw, stored, texts, blocks)
        normal = np.log(np.exp(logits).sum(axis=-1))
        right = np.take_along_axis(logits, blocks.labels[..., 1:, None].astype(int), -1)[..., 0]
        return float((weights * (normal - right)).sum() / weights.sum())

    assert trained.sum() > 10 and abs(loss.item() - expected()) < 1e-4
    for path, gradient in tree_flatten(gradients):
        found = np.array(gradient)
        at = np.unravel_index(np.abs(found).argmax(), found.shape)
        middle, ends = stored[path][at], []
        for sign in (1, -1):
            stored[path][at] = middle + sign * step
            ends.append(expected())
        stored[path][at] = middle
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(found[at] - slope) < 1e-3 * max(abs(slope), 0.05), path


def test_some_blocks_show_tokens_that_teach_nothing_and_the_others_none(texts):
    sampler = BlockSampler(texts.texts, 8, (2, 40), seed=1, reveal_share=0.5)
    seen = [sampler.blocks(step) for step in range(6)]
    again = BlockSampler(texts.texts, 8, (2, 40), seed=1, reveal_share=0.5).blocks(5)
    assert np.array_equal(seen[5].revealed, again.revealed)
    shown = np.concatenate([blocks.revealed[:, :, 1:].reshape(-1, 7) for blocks in seen])
    showing = shown.any(axis=-1).mean()
    assert 0.3 < showing < 0.55, "half of them, some of which happen to show none"
    assert 0.15 < shown.mean() < 0.35
    for blocks in seen:
        assert not (blocks.supervised & blocks.revealed).any()
        inputs = blocks.inputs(96)
        assert (inputs == blocks.tokens)[blocks.revealed].all()
        assert (inputs[..., 1:] == 96)[~blocks.revealed[..., 1:]].all()
    assert BlockSampler(texts.texts, 8, (2, 4), seed=1).blocks(0).revealed is None


def test_nothing_is_shown_behind_the_end_of_a_text(texts):
    blocks = BlockSampler(texts.texts, 8, (2, 40), seed=1, reveal_share=1.0).blocks(0)
    lengths = np.array([len(texts.texts[row].tokens) for row in blocks.rows])
    inside = blocks.anchors[..., None] + np.arange(8) < lengths[:, None, None]
    assert not blocks.revealed[~inside].any() and (~inside).any()
    assert blocks.revealed[inside].mean() > 0.3
    assert (blocks.inputs(96)[~inside] == 96).all()


# What it starts from


@pytest.mark.parametrize(("name", "layers"), [("llama", 3), ("qwen2", 2), ("qwen3", 2)])
def test_a_new_drafter_starts_as_layers_of_the_target_from_the_first_to_the_last(name, layers):
    target = Target(make_model(name), CONTEXT, name)
    tokenizer = type("Words", (), {"mask_token_id": 7})
    config = TrainConfig(mode="specdiff", steps=1, layers=layers, block_size=5)
    trainee = SpecDiffTrainee.new(config, Pair(target, tokenizer))
    assert (trainee.config.mask_token_id, trainee.config.block_size) == (7, 5)
    own, chosen = (
        dict(tree_flatten(trainee.network.parameters())),
        [0, 1, 2] if layers == 3 else [0, 2],
    )
    for i, place in enumerate(chosen):
        theirs = dict(tree_flatten(target.model.layers[place].parameters()))
        mine = {n.removeprefix(f"layers.{i}."): a for n, a in own.items() if f"layers.{i}." in n}
        assert mine.keys() == theirs.keys(), "norms of heads and biases where it has them"
        assert all(mx.array_equal(mine[key], theirs[key]) for key in mine)
    assert mx.array_equal(own["norm.weight"], target.model.model.norm.weight)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a2d-qwen3", "an embedding of its own"),
        ("ours, shifted", "shifted logits"),
        ("ours, own tables", "an embedding of its own"),
    ],
)
def test_drafters_that_cannot_be_trained_here_are_refused(tmp_path, name, said):
    folder = write_drafter_folder(tmp_path, *FORMATS[name])
    with pytest.raises(DFlashError, match=said) as failure:
        SpecDiffTrainee.read(folder, tiny_target())
    assert failure.value.next_step


# Learning

KNOWN = greedy_rows(12, 36)


def test_a_drafter_overfits_some_answers_and_decoding_accepts_what_was_measured(tmp_path):
    texts = texts_of(KNOWN)
    settings = {"sequences": 6, "anchors": 16, "draft_vocabulary": VOCAB_SIZE, "warmup": 10}
    settings |= {"steps": 150, "learning_rate": 8e-3, "reveal_share": 0.25, "seed": 3}
    trainer = Trainer(trainee_of(ours()), texts, TrainConfig(mode="specdiff", **settings))
    assert measure(trainer.trainee, texts).tokens_per_round < 1.5
    list(trainer.losses())
    assert measure(trainer.trainee, texts).tokens_per_round > 4
    trainer.trainee.save(tmp_path)
    saved, target = SpecDiffTrainee.read(tmp_path, tiny_target()), tiny_target()
    pair = Pair(target, None, (masked_formats.load(tmp_path, target),))
    drafter = make_drafter(pair, DecodeConfig("specdiff", saved.config.block_size))
    answers = [decoded(target, drafter, row) for row in KNOWN]
    assert [sum(rounds, ()) for rounds in answers] == [row.answer for row in KNOWN]
    lengths = [len(tokens) for _, *rounds in answers for tokens in rounds]
    walked = 1 + walk(saved, texts).hits.sum(axis=-1)
    over = walked - lengths  # a walk counts the token behind an answer's last one
    assert over.min() == 0 and over.max() == 1 and over.sum() <= len(KNOWN)
    assert np.mean(lengths) > 4


def test_a_run_leaves_a_drafter_that_loads_goes_on_and_is_compared(place, capsys):
    place.train(mode="specdiff", layers=2, reveal_share=0.5)
    raw = json.loads((place.out / "config.json").read_text())
    assert raw["architectures"] == ["MaskedDiffusionDraftModel"] and raw["mask_token_id"] == 8
    pair = load_pair(PairConfig(str(place.model), str(place.out)))
    assert [model.family for model in pair.drafters] == ["specdiff"]
    first, last = place.history()
    assert first["loss"] is None and 0 < last["loss"] < 10
    place.train(mode="specdiff", layers=2, reveal_share=0.5, steps=6)
    assert [record["step"] for record in place.history()] == [0, 4, 6]
    again = place.root / "again"
    place.train(mode="specdiff", init=place.out, out=again, steps=2)
    capsys.readouterr()
    both = ["--drafter", str(place.out), "--drafter", str(again), "--all-rows"]
    compare.main([*both, "--model", str(place.model), "--corpus", str(place.corpus)])
    out = capsys.readouterr().out
    assert str(place.out) in out and str(again) in out


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(place, monkeypatch):
    options = {"mode": "specdiff", "reveal_share": 0.5, "steps": 4, "evaluate_minutes": 1e-9}
    place.train(out=place.root / "through", **options)
    losses = Trainer.losses

    def interrupted(self: Trainer) -> Iterator[float]:
        yield from islice(losses(self), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "losses", interrupted)
        place.train(**options)
    place.train(**options)
    assert [record["step"] for record in place.history()] == [0, 1, 2, 3, 4]
    found, expected = files(place.out), files(place.root / "through")
    assert found["model.safetensors"] == expected["model.safetensors"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reveal_share": 1.5}, "reveal_share is 1.5"),
        ({"layers": 9}, "layers is 9, but .* has only 3"),
        ({"taps": 5}, "taps is 5, but a SpecDiff drafter reads no layers"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(place, given, said):
    with pytest.raises(DFlashError, match=said):
        place.train(mode="specdiff", **given)
    assert not place.out.exists()
