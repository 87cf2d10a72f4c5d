"""The profile of training counts what a step multiplies, and changes nothing about it."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafters.dflash.network import NetworkConfig
from dflash_mlx.system import cpu_math
from dflash_mlx.train import steps, trainee
from dflash_mlx.train.data import Texts
from dflash_mlx.train.trainer import Trainer
from support.tiny_training import (
    Place,
    drafter_config,
    greedy_rows,
    make_trainer,
    sliding,
    texts_of,
    write_target,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_training.py"
CONFIGS = {
    "full": drafter_config(),
    "mixed": drafter_config(**sliding("SFS", 6), block_size=6),
    "one key for all heads": drafter_config(num_key_value_heads=1, num_hidden_layers=1),
    "a key for every head": drafter_config(num_key_value_heads=4, head_dim=8),
    "three taps": drafter_config(dflash={"target_layer_ids": [0, 1, 2]}),
}
SETTINGS: list[dict[str, Any]] = [
    {"sequences": 2, "anchors": 4, "short_share": 0.0},
    {"sequences": 3, "anchors": 2, "short_share": 1.0, "draft_vocabulary": 31},
    {"mode": "variable-prefix", "loss": "decay"},
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("profile_training", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["profile_training"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def texts_with(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(taps: tuple[int, ...]) -> Texts:
        return texts_of(tmp_path_factory.mktemp("features"), greedy_rows(4, 12), taps)

    return make


def trainer_of(texts_with: Any, name: str = "full", **settings: Any) -> Trainer:
    taps = CONFIGS[name]["dflash_config"]["target_layer_ids"]
    return make_trainer(texts_with(tuple(taps)), CONFIGS[name], **settings)


Shapes = Counter[tuple[int, tuple[int, ...], int]]


def key(m: int, n: int, k: int, batch: int = 1) -> tuple[int, tuple[int, ...], int]:
    """Of a product or its transpose."""
    return batch, tuple(sorted((m, n))), k


def multiplied(trainer: Trainer, batch: Any) -> Shapes:
    """The matrix products in MLX's graph of a step's loss and gradients."""
    found: Shapes = Counter()

    def see(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] in ("Matmul", "AddMM"):
            (*lead, m, k), (*_, n) = (operand[1] for operand in event["inputs"][:2])
            found[key(m, n, k, math.prod(lead))] += 1

    def step(features: mx.array, x: mx.array) -> list[mx.array]:
        loss, gradients = trainer._gradients(replace(batch, features=features, x=x))
        return [loss, *(array for _, array in tree_flatten(gradients))]

    mx.export_function(see, step, batch.features, batch.x)
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=["dflash", "short blocks", "variable prefix"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_products_are_those_in_the_graph_of_a_step(
    script, texts_with, monkeypatch, name, settings
):
    monkeypatch.setattr(cpu_math, "applies", lambda: False)  # NumPy's part is in no graph
    trainer = trainer_of(texts_with, name, **settings)
    batch = trainer.batch(trainer._sampler.blocks(0))
    wanted = script.products(trainer.trainee.config, script.Shape.of(batch, trainer))
    counted: Shapes = Counter()
    for p in wanted:
        counted[key(p.m, p.n, p.k, p.batch)] += p.times
    assert counted == multiplied(trainer, batch)


def test_multiply_adds_of_a_step_are_those_worked_out_by_hand(script):
    config = NetworkConfig(
        hidden_size=10,
        intermediate_size=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=3,
        rms_norm_eps=1e-6,
        rope={},
        max_position_embeddings=64,
        layer_windows=(None, None),
        layer_causal=(False, False),
        attention_bias=False,
        block_size=5,
        mask_token_id=0,
        target_layer_ids=(0, 1, 2),
        num_target_layers=4,
        vocab_size=50,
    )
    wanted = script.products(config, script.Shape(S=2, A=3, B=5, T=11, N=20, V=40))
    counted: Counter[str] = Counter()
    for product in wanted:
        counted[product.name] += product.multiply_adds
    rows, context, layers = 2 * 3 * 5, 2 * 11, 2
    projections = rows * 10 * 12 * 2 + (rows + context) * 10 * 6 * 2
    attention = 2 * rows * 4 * 3 * (11 + 5)
    assert counted == {
        "fc": 2 * context * 30 * 10,
        "projections": 3 * layers * projections,
        "attention": 3 * layers * attention,
        "MLP": 3 * layers * 3 * rows * 10 * 7,
        "head": 2 * 20 * 40 * 10,
    }


def test_products_alone_are_run_in_their_shapes_as_often_as_a_step_does(script, monkeypatch):
    evaluated, evaluate = [], mx.eval
    monkeypatch.setattr(
        mx, "eval", lambda *a: (evaluated.append([x.shape for x in a]), evaluate(*a))
    )
    script.time_products(
        [script.Product("a", 2, 3, 4, batch=5, times=2), script.Product("b", 6, 7, 8)]
    )
    assert evaluated == [
        [(5, 2, 4), (5, 4, 3)],
        [(5, 2, 3)],
        [(5, 2, 3)],
        [(6, 8), (8, 7)],
        [(6, 7)],
    ]


# Steps that are watched


def weights(trainer: Trainer) -> dict[str, bytes]:
    parts = (trainer.trainee.network.parameters(), trainer.optimizer.state)
    return {name: np.array(array).tobytes() for name, array in tree_flatten(parts)}


@pytest.mark.parametrize("settings", [{}, {"mode": "variable-prefix", "loss": "decay"}])
def test_a_step_that_is_stopped_or_watched_does_what_a_step_does(script, texts_with, settings):
    plain, watched = (trainer_of(texts_with, **settings) for _ in range(2))
    for _ in range(4):
        plain.train_step()
    for _ in range(2):
        clock = script.stopped_step(watched)
        assert all(seconds > 0 for seconds in clock.seconds.values())
        _, batch = script.plain_step(watched)
        assert batch.x.shape[0] == watched.config.sequences
    assert (watched.step, watched.tokens) == (plain.step, plain.tokens)
    assert weights(watched) == weights(plain)


def test_a_round_measures_the_same_blocks_twice(script, texts_with, monkeypatch):
    asked, trainer = [], trainer_of(texts_with)
    blocks = trainer._sampler.blocks
    monkeypatch.setattr(trainer._sampler, "blocks", lambda i: (asked.append(i), blocks(i))[1])
    rounds = script.profile(trainer, 3)
    assert asked == [0, 0, 1, 1, 2, 2, 3, 3]
    assert trainer.step == 4
    sizes = [blocks(i).tokens.shape for i in (1, 2, 3)]
    assert [(r.shape.S, r.shape.A, r.shape.B) for r in rounds] == sizes
    for r in rounds:
        assert r.wanted == script.products(trainer.trainee.config, r.shape)
        assert r.parts.keys() == script.PARTS.keys()


def test_the_parts_come_in_their_order(script, texts_with, monkeypatch):
    parts, mark = [], script.Clock.mark
    monkeypatch.setattr(
        script.Clock, "mark", lambda clock, part, *a: (parts.append(part), mark(clock, part, *a))
    )
    script.stopped_step(trainer_of(texts_with))
    assert parts == ["batch", "forward", "head", "backward", "update"]


def test_nothing_is_stopped_afterwards_also_after_an_exception(script, texts_with):
    trainer = trainer_of(texts_with)

    def places() -> tuple[Any, ...]:
        return trainee.hidden_states, steps.optim.clip_grad_norm, trainer.batch

    before = places()
    with pytest.raises(KeyError), script.stops(trainer, script.Clock()):
        assert all(now != then for now, then in zip(places(), before, strict=True))
        raise KeyError
    assert places() == before


def test_a_profile_is_printed(script, tmp_path, capsys):
    place = Place(tmp_path, write_target(tmp_path / "model"))
    words = place.words(out=None, init=place.drafter(), layers=None, steps=2)
    script.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "medians of 2 rounds"
    counts = {
        line.split("e9")[1].strip(): float(line.split()[0]) for line in lines if " e9" in line
    }
    total = counts.pop("multiply-adds in matrix products")
    assert counts.keys() == {"fc", "projections", "attention", "MLP", "head"}
    assert total == pytest.approx(sum(counts.values()), abs=0.003)
    assert all(any(words in line for line in lines) for words in script.PARTS.values())
    assert "of the arithmetic peak" in lines[-1]
