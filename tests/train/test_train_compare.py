"""A tiny drafter learns twenty answers by heart, and what is measured is what decoding accepts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train import compare
from dflash_mlx.train.compare import ANCHORS, hits_at, measure, walk
from dflash_mlx.train.data import Texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.trainer import Trainer
from support.reference_dflash import hidden_states
from support.tiny_training import (
    Place,
    arrays_of,
    corpus_rows,
    decoded,
    drafter_config,
    greedy_rows,
    make_trainee,
    make_trainer,
    sampled_row,
    texts_of,
    tiny_target,
)

RAW = drafter_config()
BLOCK = RAW["block_size"]
KNOWN = greedy_rows(20, 40)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts_of(tmp_path_factory.mktemp("features"), KNOWN)


@pytest.fixture(scope="module")
def trained(texts: Texts) -> Trainer:
    """A drafter that knows twenty answers, in about 1,000 blocks of each."""
    shape = {"sequences": 10, "anchors": 16}
    trainer = make_trainer(texts, RAW, steps=200, learning_rate=8e-3, warmup=10, **shape)
    list(trainer.losses())
    return trainer


def test_a_drafter_overfits_twenty_sequences_and_decoding_accepts_what_was_measured(
    trained, texts, tmp_path
):
    assert measure(make_trainee(RAW), texts).tokens_per_round < 1.5
    assert measure(trained.trainee, texts).tokens_per_round > 6
    trained.trainee.save(tmp_path)
    saved, target = DFlashTrainee.read(tmp_path, tiny_target()), tiny_target()
    pair = Pair(target, None, (BlockModel(saved.network, saved.config, target),))
    drafter = make_drafter(pair, DecodeConfig("dflash", saved.config.block_size))
    answers = [decoded(target, drafter, row) for row in KNOWN]
    assert [sum(rounds, ()) for rounds in answers] == [row.answer for row in KNOWN]
    lengths = [len(tokens) for _, *rounds in answers for tokens in rounds]
    walked = 1 + walk(saved, texts).hits.sum(axis=-1)
    over = walked - lengths  # a walk counts the token behind an answer's last one
    assert over.min() == 0 and over.max() == 1 and over.sum() <= len(KNOWN)
    assert np.mean(lengths) > 6


# Measuring


def hits_by_loops(trainer: Trainer, texts: Texts, prefix: int) -> np.ndarray:
    """Text after text, anchor after anchor, by the NumPy drafter."""
    tensors = arrays_of(trainer.trainee.network)
    table = np.array(tiny_target().embedding().weight)
    result = []
    for i, text in enumerate(texts.texts):
        anchors = text.anchors[: max(1, len(text.anchors) - prefix)]
        spread = np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)
        for anchor in anchors[spread]:
            features = np.array(texts.features([i], np.zeros(1, int), int(anchor))[0])
            tokens = [int(t) for t in text.tokens[anchor : anchor + 1 + prefix]]
            tokens += [0] * (prefix + 1 - len(tokens)) + [5] * (BLOCK - 1 - prefix)
            logits = hidden_states(tensors, RAW, table[tokens], features) @ table.T
            hits = []
            for k in range(prefix + 1, BLOCK):
                at = anchor + k
                choice = text.likely[at - 1, 0] if at < len(text.tokens) else -1
                hits.append(bool(logits[k].argmax() == choice) and all(hits))
                if choice >= 0 and text.tokens[at] != choice:
                    hits += [False] * (BLOCK - 1 - prefix - len(hits))
                    break
            result.append(hits)
    return np.array(result, float)


@pytest.mark.parametrize("prefix", [0, 2, BLOCK - 2])
def test_a_measurement_is_what_loops_over_texts_and_anchors_find(trained, tmp_path, prefix):
    rows = [*KNOWN[:3], *greedy_rows(12, 9, seed=1)[:6], sampled_row("s", KNOWN[4])]
    texts = texts_of(tmp_path / "cache", rows)  # more than one batch, known texts and new ones
    found = measure(trained.trainee, texts, prefix)
    expected = hits_by_loops(trained, texts, prefix)
    assert 0 < expected.mean() < 1
    assert np.array_equal(found.hits, expected)
    assert found.tokens_per_round == pytest.approx(1 + expected.sum(axis=-1).mean())
    assert found.by_position == pytest.approx(expected.mean(axis=0))


@pytest.mark.parametrize("chunk", [2048, 24])
def test_a_walk_begins_every_round_where_the_one_before_ended(
    trained, tmp_path, monkeypatch, chunk
):
    monkeypatch.setattr(compare, "_CHUNK", chunk)
    texts = texts_of(tmp_path / "cache", [*KNOWN[:2], greedy_rows(12, 9, seed=1)[0]])
    walked, rounds = walk(trained.trainee, texts).hits, []
    for i, text in enumerate(texts.texts):
        place = 1  # behind the first token
        while place < len(text.anchors):
            anchor = text.anchors[place : place + 1][None]
            rounds.append(hits_at(trained.trainee, texts, np.array([i]), anchor)[0, 0])
            place += 1 + int(rounds[-1].sum())
    assert np.array_equal(walked, rounds)


# Drafters side by side


def drafter(place: Place, name: str, seed: int = 0, **changes: object) -> Path:
    make_trainee(drafter_config(**changes), seed).save(place.root / name)
    return place.root / name


def run(place: Place, *drafters: Path, more: tuple[str, ...] = (), **options: object) -> None:
    unwanted = dict.fromkeys(("out", "steps", "sequences", "anchors", "layers"))
    named = [word for folder in drafters for word in ("--drafter", str(folder))]
    compare.main([*place.words(**{**unwanted, **options}), *named, *more])


def test_drafters_are_compared_on_the_held_out_greedy_rows(place, capsys):
    first, second = drafter(place, "a"), drafter(place, "b", seed=1, block_size=4)
    run(place, first, second, json=place.root / "figures.json")
    figures = json.loads((place.root / "figures.json").read_text())
    assert figures.keys() == {str(first), str(second)}
    for folder, size in ((first, 8), (second, 4)):
        assert figures[str(folder)].keys() == {"all", "tiny"}
        found = figures[str(folder)]["all"]
        assert found == figures[str(folder)]["tiny"]
        assert found["texts"] == 2  # rows 0 and 3; row 6 is sampled
        assert len(found["by_position"]) == len(found["by_prefix"]) == size - 1
        assert found["tokens_per_round"] == pytest.approx(1 + sum(found["by_position"]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 and f"{first} (all)" in lines[2]
    run(place, first, held_out=None, json=place.root / "j", more=("--all-rows",))
    greedy = sum(row.temperature == 0 for row in corpus_rows())
    assert json.loads((place.root / "j").read_text())[str(first)]["all"]["texts"] == greedy < 7


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"held_out": 1}, "held_out is 1"),
        ({"held_out": -3}, "held_out is -3"),
        ({"json": "nowhere/j.json"}, "nowhere/j.json"),
        ({"drafter": "other"}, "different layers"),
    ],
)
def test_what_cannot_be_compared_is_refused(place, options, named):
    folders = [drafter(place, "a")]
    if options.pop("drafter", None):
        folders.append(drafter(place, "other", dflash={"target_layer_ids": [0, 1]}))
    with pytest.raises(DFlashError, match=named) as failure:
        run(place, *folders, **options)
    assert failure.value.next_step
