"""A run that was stopped goes on as if it had not been, or says why it cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train import state
from dflash_mlx.train.data import Texts
from dflash_mlx.train.state import has_state, restore_state, save_state
from dflash_mlx.train.trainer import Trainer
from support.tiny_training import drafter_config, greedy_rows, make_trainer, sampled_row, texts_of

MODES = ["dflash", "variable-prefix"]
STEPS = 7


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    rows = greedy_rows(4, 20)
    rows = (*rows, sampled_row("sampled", rows[0]))
    return texts_of(tmp_path_factory.mktemp("features"), rows)


def trainer_of(texts: Texts, **settings: Any) -> Trainer:
    return make_trainer(texts, **{"steps": STEPS, **settings})


def train(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.train_step() for _ in range(steps)]


def everything(trainer: Trainer) -> dict[str, np.ndarray]:
    """Weights and the optimiser's state, bit by bit."""
    parts = {"network": trainer.trainee.network.parameters(), "optimizer": trainer.optimizer.state}
    flat = tree_flatten(parts)
    return {name: np.array(array) for name, array in flat}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a
    )


@pytest.fixture
def stopped(tmp_path: Path, texts: Texts) -> Path:
    """A folder where a run stopped after three steps."""
    trainer = trainer_of(texts)
    train(trainer, 3)
    save_state(tmp_path, trainer, "corpus")
    return tmp_path


# Going on


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stops", [[0], [3], [1, 5], [STEPS]])
def test_a_run_that_was_stopped_ends_with_the_same_weights_to_the_bit(tmp_path, texts, mode, stops):
    through = trainer_of(texts, mode=mode)
    losses = train(through, STEPS)
    found: list[float] = []
    for stop in [*stops, STEPS]:
        trainer = trainer_of(texts, mode=mode)
        if has_state(tmp_path):
            restore_state(tmp_path, trainer, "corpus")
        assert trainer.step == len(found)
        found += train(trainer, stop - trainer.step)
        save_state(tmp_path, trainer, "corpus")
    assert found == losses
    assert trainer.step == through.step == STEPS
    assert same(everything(trainer), everything(through))
    assert not same(everything(trainer), everything(trainer_of(texts, mode=mode)))


def test_time_and_place_go_on_too(stopped, texts):
    before = trainer_of(texts)
    before.step, before.seconds = 5, 12.5
    save_state(stopped, before, "corpus")
    trainer = trainer_of(texts)
    restore_state(stopped, trainer, "corpus")
    assert (trainer.step, trainer.seconds) == (5, 12.5)
    assert trainer.learning_rate() == before.learning_rate() != trainer_of(texts).learning_rate()


@pytest.mark.parametrize("changes", [{"steps": 50}, {"steps": None, "minutes": 2.0}])
def test_a_run_may_be_made_longer(stopped, texts, changes):
    trainer = trainer_of(texts, **changes)
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3


# Kills


def test_only_the_newest_state_is_kept(stopped, texts):
    trainer = trainer_of(texts)
    for _ in range(2):
        train(trainer, 1)
        save_state(stopped, trainer, "corpus")
    assert [file.name for file in stopped.iterdir()] == ["state"]
    names = {file.name for file in (stopped / "state").iterdir()}
    assert names == {"state.json", "arrays.safetensors"}


class Killed(BaseException):
    """What `kill -9` does to the rest of a function."""


def kill_before(monkeypatch: pytest.MonkeyPatch, count: int) -> list[str]:
    """Let the next save do `count` operations and no more; returns what it does."""
    done: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(done) == count:
                raise Killed
            done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watch(Path, "mkdir"), watch(Path, "rename"), watch(shutil, "rmtree")
    watch(state, "replace_safetensors"), watch(state, "replace_text")
    return done


def saves(monkeypatch: pytest.MonkeyPatch, folder: Path, trainer: Trainer, count: int) -> list[str]:
    """Save, and be killed after `count` operations; returns those that were done."""
    with monkeypatch.context() as patch:
        done = kill_before(patch, count)
        try:
            save_state(folder, trainer, "corpus")
        except Killed:
            return done
    return [*done, "finished"]


@pytest.mark.parametrize("only_old", [False, True], ids=["beside a state", "beside an old state"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_state(
    stopped, texts, monkeypatch, only_old
):
    if only_old:  # a kill between the two renames of the save before
        (stopped / "state").rename(stopped / "state-old")
        shutil.copytree(stopped / "state-old", stopped / "state-new")
    trainer = trainer_of(texts)
    train(trainer, 4)
    for count in range(20):
        folder = stopped.parent / f"{stopped.name}-{count}"
        shutil.copytree(stopped, folder)
        done = saves(monkeypatch, folder, trainer, count)
        assert has_state(folder)
        other = trainer_of(texts)
        restore_state(folder, other, "corpus")
        assert other.step in (3, 4)
        save_state(folder, other, "corpus")
        assert [file.name for file in folder.iterdir()] == ["state"]
        if "finished" in done:
            assert other.step == 4
            assert {"mkdir", "rename", "replace_safetensors", "replace_text"} <= set(done)
            return
    pytest.fail("the save did not end")


def test_a_full_disk_leaves_the_state_before(stopped, texts, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = trainer_of(texts)
    train(trainer, 4)
    monkeypatch.setattr(state, "replace_safetensors", full)
    with pytest.raises(OSError, match="No space"):
        save_state(stopped, trainer, "corpus")
    monkeypatch.undo()
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "variable-prefix"}, "has mode 'dflash', not 'variable-prefix'"),
        ({"seed": 9}, "has seed 0, not 9"),
        ({"learning_rate": 1e-5}, "has learning_rate 0.0008, not 1e-05"),
        ({"anchors": 5}, "has anchors 4, not 5"),
        ({"loss": "decay"}, "has loss 'dpace', not 'decay'"),
        ({"soft": 0.25}, "has soft 0.5, not 0.25"),
        ({"held_out": 7}, "has held_out 50, not 7"),
    ],
)
def test_other_settings_are_refused_by_name(stopped, texts, changes, message):
    trainer = trainer_of(texts, **changes)
    before = everything(trainer)
    with pytest.raises(DFlashError, match=message) as failure:
        restore_state(stopped, trainer, "corpus")
    assert str(stopped) in failure.value.what and "--out" in failure.value.next_step
    assert same(everything(trainer), before)


def test_a_state_from_before_soft_labels_goes_on_without_them(stopped, texts):
    file = stopped / "state" / "state.json"
    about = json.loads(file.read_text())
    del about["run"]["soft"]
    file.write_text(json.dumps(about))
    with pytest.raises(DFlashError, match="has soft 0.0, not 0.5"):
        restore_state(stopped, trainer_of(texts), "corpus")
    trainer = trainer_of(texts, soft=0.0)
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3


def test_a_state_from_before_anchor_laws_goes_on_with_all_anchors_alike(stopped, texts):
    file = stopped / "state" / "state.json"
    about = json.loads(file.read_text())
    assert about["run"].pop("anchor_law") == "even"
    file.write_text(json.dumps(about))
    trainer = trainer_of(texts)
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3
    with pytest.raises(DFlashError, match="has anchor_law 'even', not 'starts'"):
        restore_state(stopped, trainer_of(texts, anchor_law="starts"), "corpus")


def test_the_two_anchor_laws_train_on_different_blocks(texts):
    laws = ("even", "even", "starts")
    first, again, other = (trainer_of(texts, anchor_law=law).train_step() for law in laws)
    assert first == again != other


def test_another_corpus_is_refused(stopped, texts):
    with pytest.raises(DFlashError, match="has data 'corpus', not 'another'; repeat the settings"):
        restore_state(stopped, trainer_of(texts), "another")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 1}, r"drafter's layer_windows \[None, None\], not \[None\]"),
        ({"intermediate_size": 32}, "drafter's intermediate_size 96, not 32"),
        ({"rope_theta": 5e5}, "drafter's rope .*10000.*, not .*500000"),
        ({"dflash": {"mask_token_id": 6}}, "drafter's mask_token_id 5, not 6"),
    ],
)
def test_another_drafter_is_refused(stopped, texts, fields, message):
    trainer = make_trainer(texts, drafter_config(**fields), steps=STEPS)
    with pytest.raises(DFlashError, match=f"has {message}.*--out"):
        restore_state(stopped, trainer, "corpus")


def test_a_state_that_does_not_say_what_its_drafter_was_is_continued(stopped, texts):
    file = stopped / "state" / "state.json"
    about = json.loads(file.read_text())
    assert about.pop("drafter")["drafter's mask_token_id"] == 5
    file.write_text(json.dumps(about))
    trainer = trainer_of(texts)
    restore_state(stopped, trainer, "corpus")
    assert trainer.step == 3


Damage = Callable[[Path], Any]


def edited(name: str, value: Any) -> Damage:
    def edit(folder: Path) -> None:
        about = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**about, name: value}))

    return edit


def without(prefix: str) -> Damage:
    """The arrays whose names begin so are missing."""

    def edit(folder: Path) -> None:
        file = folder / "arrays.safetensors"
        arrays = {k: v for k, v in mx.load(str(file)).items() if not k.startswith(prefix)}
        mx.eval(arrays)
        mx.save_safetensors(str(file), arrays)

    return edit


def cut(share: float) -> Damage:
    def edit(folder: Path) -> None:
        file = folder / "arrays.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: int(share * len(data))])

    return edit


DAMAGES: dict[str, Damage] = {
    "an empty state.json": lambda folder: (folder / "state.json").write_text(""),
    "half a state.json": lambda folder: (folder / "state.json").write_text('{"step": 3'),
    "a state.json that is a list": lambda folder: (folder / "state.json").write_text("[3]"),
    "a state.json of other bytes": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe"),
    "no step": edited("step", None),
    "a step in words": edited("step", "three"),
    "no settings": edited("run", None),
    "no drafter": edited("drafter", 5),
    "no arrays": lambda folder: (folder / "arrays.safetensors").unlink(),
    "empty arrays": cut(0.0),
    "a cut header": cut(0.005),
    "half the arrays": cut(0.5),
    "all but the last arrays": cut(0.999),
    "arrays of other bytes": lambda folder: (folder / "arrays.safetensors").write_bytes(b"a" * 99),
    "no optimiser": without("optimizer."),
    "no momentum of one tensor": without("optimizer.fc.weight"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_reported(stopped, texts, damage):
    DAMAGES[damage](stopped / "state")
    trainer = trainer_of(texts)
    with pytest.raises(DFlashError) as failure:
        restore_state(stopped, trainer, "corpus")
    assert f"{stopped}/state" in failure.value.what
    assert "--init" in failure.value.next_step or "--out" in failure.value.next_step
