"""`python -m dflash_mlx.train` on a tiny model: what it leaves, and how it goes on."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.state import has_state
from dflash_mlx.train.trainer import Trainer
from support.reference_dflash import random_drafter
from support.tiny_training import CONTEXT, files

# What a run leaves


@pytest.mark.parametrize("mode", ["dflash", "variable-prefix"])
def test_a_run_leaves_a_drafter_its_history_and_its_state(place, mode, capsys):
    place.train(mode=mode, plot=place.root / "run.png")
    weights, raw = place.read()
    assert all(np.isfinite(array).all() for array in weights.values())
    kind = raw["dflash_config"].get("training_mode")
    assert kind == ("vp_drafter" if mode == "variable-prefix" else None)
    assert raw["dflash_config"]["mask_token_id"] == 8  # "$"
    first, last = place.history()
    assert (first["step"], last["step"]) == (0, 4)
    assert first["loss"] is None and 0 < last["loss"] < 10
    assert len(last["by_prefix"]) == (7 if mode == "variable-prefix" else 1)
    assert len(last["by_position"]) == 7
    assert has_state(place.out)
    assert (place.root / "run.png").read_bytes()[:4] == b"\x89PNG"
    said = capsys.readouterr().err
    assert "step 4 |" in said and "tokens/round" in said


def test_the_drafter_is_kept_as_it_was_when_it_measured_best(place, monkeypatch):
    scores, kept = iter([0.25, 0.75, 0.75, 0.5]), []

    def measure(*_: Any) -> SimpleNamespace:
        kept.append(files(place.out))
        score = next(scores)
        return SimpleNamespace(tokens_per_round=1 + score, by_position=[score] * 7)

    monkeypatch.setattr("dflash_mlx.train.run.measure", measure)
    place.train(steps=3, evaluate_minutes=1e-9)
    assert [record["by_prefix"] for record in place.history()] == [[0.25], [0.75], [0.75], [0.5]]
    first, best, last = kept[1], kept[2], files(place.out)
    for name in ("model.safetensors", "config.json"):
        assert last[name] == best[name]
    assert best["model.safetensors"] != first["model.safetensors"]


# Going on


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    train_step = Trainer.train_step

    def step(self: Trainer) -> float:
        if self.step == steps:
            raise KeyboardInterrupt
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", step)


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(place, monkeypatch):
    options = {"steps": 5, "evaluate_minutes": 1e-9, "mode": "variable-prefix"}
    place.train(out=place.root / "through", **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 3)
        place.train(**options)
    assert [record["step"] for record in place.history()] == [0, 1, 2, 3]
    place.train(**options)
    assert [record["step"] for record in place.history()] == [0, 1, 2, 3, 4, 5]
    found, expected = files(place.out), files(place.root / "through")
    assert found.keys() == expected.keys()
    for name in ("model.safetensors", "config.json"):
        assert found[name] == expected[name]
    arrays = [
        load_file(folder / "state" / "state.safetensors")
        for folder in (place.out, place.root / "through")
    ]
    assert arrays[0].keys() == arrays[1].keys()
    assert all(arrays[0][name].tobytes() == arrays[1][name].tobytes() for name in arrays[0])


def test_a_finished_run_stays_as_it_is_until_more_steps_are_asked_for(place):
    place.train(steps=2)
    before = files(place.out)
    place.train(steps=2)
    assert files(place.out) == before
    place.train(steps=3)
    assert [record["step"] for record in place.history()] == [0, 2, 3]


@pytest.mark.parametrize("killed", ["in a line", "before its state was saved"])
def test_a_kill_around_the_writing_of_the_history_is_survived(place, killed):
    place.train(steps=2)
    ahead = json.dumps({**place.history()[-1], "step": 9}) + "\n"
    with (place.out / "history.jsonl").open("a") as file:
        file.write(ahead[:15] if killed == "in a line" else ahead)
    for steps in (3, 4):
        place.train(steps=steps)
    assert [record["step"] for record in place.history()] == [0, 2, 3, 4]


def test_a_history_that_is_damaged_is_reported(place):
    place.train(steps=2)
    (place.out / "history.jsonl").write_text('{"steps": 2}\n')
    with pytest.raises(DFlashError, match="history.jsonl"):
        place.train(steps=3)


def test_a_run_that_was_stopped_before_its_first_save_begins_again(place):
    place.out.mkdir()
    (place.out / "history.jsonl").touch()
    (place.out / "model.safetensors").write_bytes(b"half")
    place.train(steps=2)
    assert has_state(place.out)
    shutil.rmtree(place.out / "state")  # by hand, to save space: the drafter is finished
    with pytest.raises(DFlashError, match="holds no run to continue"):
        place.train(steps=2)


# Starting from a drafter


def test_what_training_does_not_change_is_saved_as_it_was(place):
    init = place.drafter(note={"by": "me"}, dflash={"training_mode": "other", "more": [1]})
    place.train(init=init, learning_rate=1e-30, weight_decay=0.0, steps=1)
    weights, raw = place.read()
    given = json.loads((init / "config.json").read_text())
    del given["dflash_config"]["training_mode"]
    assert raw == {**given, "dtype": "bfloat16"}
    for name, array in random_drafter(given).items():
        rounded = np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
        assert np.array_equal(weights[name], rounded)


def test_a_run_that_began_with_a_drafter_is_not_continued_with_a_new_one(place):
    alike = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    init = place.drafter(**alike, dflash={"target_layer_ids": [1]})  # but for the mask
    place.train(init=init, steps=2)
    before = files(place.out)
    with pytest.raises(DFlashError, match="mask_token_id 5, not 8"):
        place.train(steps=3)
    assert files(place.out) == before
    place.train(init=init, steps=3)
