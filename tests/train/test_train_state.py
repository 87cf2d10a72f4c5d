"""Steps of training; a stopped run goes on as if it had not been."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.files import replace_safetensors
from dflash_mlx.train.data import Texts
from dflash_mlx.train.loss import DraftVocabulary, draft_size
from dflash_mlx.train.run import STATE, identity, restore_state, save_state
from dflash_mlx.train.trainer import Trainer
from dflash_mlx.verifier.model import Target
from support.families import VOCAB_SIZE, make_model
from support.tiny_training import (
    CONTEXT,
    WIDTH,
    arrays_of,
    files,
    full_disk,
    greedy_rows,
    make_trainee,
    make_trainer,
    sampled_row,
    texts_of,
)

STEPS = 6


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    rows = greedy_rows(4, 20)
    rows = (*rows, sampled_row("sampled", rows[0]))
    return texts_of(tmp_path_factory.mktemp("features"), rows)


def trainer_of(texts: Texts, **settings: Any) -> Trainer:
    return make_trainer(texts, **{"steps": STEPS, **settings})


@pytest.fixture
def stopped(tmp_path: Path, texts: Texts) -> Path:
    """A folder where a run stopped after three steps."""
    trainer = trainer_of(texts)
    for _ in range(3):
        trainer.train_step()
    save_state(tmp_path, trainer, "corpus")
    return tmp_path


# Going on


# How the same drafter is asked for is free.
LONGER = {"steps": None, "minutes": 2.0, "layers": 2, "taps": 2}


@pytest.mark.parametrize("changes", [{}, LONGER])
def test_time_and_place_go_on_too_and_a_run_may_be_made_longer(stopped, texts, changes):
    before = trainer_of(texts)
    before.step, before.seconds, before.tokens = 5, 12.5, 77
    save_state(stopped, before, "corpus")
    trainer = trainer_of(texts, **changes)
    restore_state(stopped, trainer, "corpus")
    assert (trainer.step, trainer.seconds, trainer.tokens) == (5, 12.5, 77)
    assert (trainer.learning_rate() == before.learning_rate()) == (changes == {})


def test_a_run_of_an_older_program_goes_on_though_that_called_fields_otherwise(stopped, texts):
    trainer = trainer_of(texts)
    run = {k: v for k, v in identity(trainer, "corpus").items() if "selector_" not in k}
    saved(run={**run, "drafter's selector": None})(stopped / STATE)
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3


@pytest.mark.parametrize("room", [0, 200_000])
def test_a_full_disk_leaves_the_state_before(stopped, texts, room):
    trainer, before = trainer_of(texts), files(stopped)
    trainer.train_step()
    with full_disk(room), pytest.raises(OSError):
        save_state(stopped, trainer, "corpus")
    assert files(stopped) == before
    (stopped / "state" / ".new-1-state.safetensors").write_bytes(b"half")  # what a kill leaves
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3


def saved(keep: Callable[[str], Any] = bool, **about: Any) -> Callable[[Path], None]:
    """Some of the arrays, and something else said of the run."""

    def edit(file: Path) -> None:
        loaded: Any = mx.load(str(file), return_metadata=True)
        arrays = {name: array for name, array in loaded[0].items() if keep(name)}
        mx.eval(arrays)
        told = {**json.loads(loaded[1]["about"]), **about}
        mx.save_safetensors(str(file), arrays, {"about": json.dumps(told)})

    return edit


def cut(share: float) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no step": saved(step=None),
    "nothing said": lambda file: mx.save_safetensors(str(file), {"a": mx.zeros(3)}),
    "an empty file": cut(0.0),
    "half the arrays": cut(0.5),
    "no momentum of one tensor": saved(lambda name: name != "optimizer.fc.weight.m"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_reported(stopped, texts, damage):
    DAMAGES[damage](stopped / STATE)
    with pytest.raises(DFlashError, match=str(stopped / STATE)) as failure:
        restore_state(stopped, trainer_of(texts), "corpus")
    assert "--init" in failure.value.next_step or "--out" in failure.value.next_step


# The drafter beside it


def test_a_drafter_is_saved_in_bfloat16_or_stays_as_it_was_on_a_full_disk(tmp_path):
    first, second = make_trainee(seed=1), make_trainee(seed=2)
    first.save(tmp_path / "a")
    second.save(tmp_path / "a")
    second.save(tmp_path / "b")
    before = files(tmp_path / "a")
    assert before == files(tmp_path / "b")
    assert before.keys() == {"config.json", "model.safetensors"}
    with full_disk(20_000), pytest.raises(OSError):
        first.save(tmp_path / "a")
    assert files(tmp_path / "a") == before
    with safe_open(tmp_path / "a" / "model.safetensors", framework="numpy") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_a_file_that_was_cut_without_a_word_does_not_replace_another(tmp_path, monkeypatch):
    file = tmp_path / "arrays.safetensors"
    replace_safetensors(file, {"a": mx.arange(50)}, {})
    before = files(tmp_path)

    def save_half(name: str, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
        Path(name).write_bytes(b"a" * (arrays["a"].nbytes // 2))

    monkeypatch.setattr(mx, "save_safetensors", save_half)
    with pytest.raises(OSError, match="No space left"):
        replace_safetensors(file, {"a": mx.arange(90)}, {})
    assert files(tmp_path) == before


# Steps


def test_the_learning_rate_rises_and_falls_with_steps_or_minutes(texts):
    trainer = make_trainer(texts, steps=100, warmup=9, learning_rate=2.0)
    found, peak = [], 2.0
    for step in range(101):
        trainer.step = step
        found.append(trainer.learning_rate())
    assert found[0] == pytest.approx(peak / 10, rel=1e-2)
    assert found[:10] == sorted(found[:10]) and found[9:] == sorted(found[9:], reverse=True)
    assert found[9] == pytest.approx(peak, rel=0.03)
    assert found[50] == pytest.approx(peak * (0.02 + 0.98 / 2))
    assert found[100] == pytest.approx(peak * 0.02)
    trainer = make_trainer(texts, steps=None, minutes=2.0)
    trainer.step, trainer.seconds = 1000, 30.0
    assert trainer.progress == 0.25


def test_a_step_is_adamw_s(texts):
    """Its first step has one length everywhere, the learning rate; then the weights decay."""
    before = arrays_of(make_trainer(texts).trainee.network)
    after = []
    for decay in (0.0, 0.5):
        given = {"warmup": 0, "steps": 1000, "learning_rate": 1e-3, "weight_decay": decay}
        trainer = make_trainer(texts, **given)
        trainer.train_step()
        after.append(arrays_of(trainer.trainee.network))
    for name, array in before.items():
        moved = np.abs(after[0][name] - array)
        assert 0 < moved.max() <= 1.001e-3 and np.median(moved) > 0.9e-3
        assert np.allclose(after[1][name] - after[0][name], -0.5e-3 * array, atol=1e-6)


def test_gradients_are_clipped_to_their_norm(texts, monkeypatch):
    seen = []
    trainer = make_trainer(texts, clip=0.05)
    update = trainer.optimizer.update

    def watch(network: Any, gradients: Any) -> None:
        flat = [np.array(array).ravel() for _, array in tree_flatten(gradients)]
        seen.append(float(np.linalg.norm(np.concatenate(flat))))
        update(network, gradients)

    monkeypatch.setattr(trainer.optimizer, "update", watch)
    trainer.train_step()
    assert seen == [pytest.approx(0.05, rel=1e-3)]


# The draft vocabulary


def biased() -> Target:
    """A target's head with a bias, as some families have."""
    target = Target(make_model("mimo"), CONTEXT, "mimo")
    target.model.lm_head.bias = mx.arange(VOCAB_SIZE) / 10
    return target


HEADS = {
    "tied": lambda: Target(make_model("llama"), CONTEXT, "llama"),
    "a head of its own": lambda: Target(make_model("mimo"), CONTEXT, "mimo"),
    "biased": biased,
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("size", "found"), [(None, VOCAB_SIZE // 4), (15, 15), (999, VOCAB_SIZE)])
def test_it_has_the_target_s_logits_of_the_most_frequent_tokens_of_the_answers(
    texts, head, size, found
):
    trainee, target = make_trainee(), HEADS[head]()
    config = replace(trainee.config, output_multiplier=0.5, final_logit_softcapping=2.0)
    vocabulary = DraftVocabulary(replace(trainee, config=config, target=target), texts, size)
    words = vocabulary.tokens
    assert draft_size(size, VOCAB_SIZE) == len(words) == found
    answers = np.concatenate([text.tokens[text.prompt_length :] for text in texts.texts])
    counts = np.bincount(answers, minlength=VOCAB_SIZE)
    assert counts[words].tolist() == sorted(counts.tolist(), reverse=True)[:found]
    assert vocabulary.index[words].tolist() == list(range(found))
    assert (vocabulary.index < 0).sum() == VOCAB_SIZE - found
    states = mx.random.normal((4, WIDTH), key=mx.random.key(0))
    expected = np.array(target.head()(states * 0.5))[:, words]
    expected = np.tanh(expected / 2.0) * 2.0
    assert np.abs(np.array(vocabulary.logits(states)) - expected).max() < 1e-5 < np.ptp(expected)
