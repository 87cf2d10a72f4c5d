"""`python -m dflash_mlx.train` on a tiny model: what it leaves and refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_mlx import corpus as collect
from dflash_mlx.cli import options as cli
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.models.load import load_target
from dflash_mlx.train import selector
from dflash_mlx.train.__main__ import main
from dflash_mlx.train.config import DataConfig
from dflash_mlx.train.data import read_texts
from dflash_mlx.train.rows import CorpusRow
from dflash_mlx.train.run import STATE
from dflash_mlx.train.trainer import Trainer
from support.reference_dflash import random_drafter
from support.tiny_training import (
    CONTEXT,
    Place,
    corpus_rows,
    files,
)

# What a run leaves


@pytest.mark.parametrize("mode", ["dflash", "variable-prefix"])
def test_a_run_leaves_a_drafter_its_history_and_its_state(place, mode, capsys):
    place.train(mode=mode)
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
    assert (place.out / STATE).exists()
    said = capsys.readouterr().err
    assert "step 4 |" in said and "tokens/round" in said


def test_a_recipe_gives_the_settings_of_its_paper_where_others_are_not_given(place, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "losses", lambda self: iter(seen.append(self.config) or ()))
    place.train(recipe="d2sd", tau=5, draft_vocabulary=20)
    (config,) = seen
    assert (config.mode, config.loss, config.tau) == ("variable-prefix", "decay", 5.0)
    assert config.draft_vocabulary == 20, "an option of a pair, too"
    assert (config.prefix_base, config.least_prefix, config.soft) == (0.9, 1, 0.0)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_blocks_of_a_drafter_that_is_trained_on_can_have_another_size(place, where):
    """`dflash_config` may have it too, and would count."""
    own = {"block_size": 6} if where == "outside" else {"dflash_config": {"block_size": 6}}
    folder = place.drafter(num_hidden_layers=1, **own)
    options = {"mode": "variable-prefix", "init": folder, "layers": None}
    place.train(**options, out=place.root / "same", steps=1)
    place.train(**options, block_size=10, steps=1)
    same, other = (FILES.read_drafter(out).config for out in (place.root / "same", place.out))
    assert (same.block_size, other.block_size) == (6, 10)
    assert len(place.history()[-1]["by_prefix"]) == 9


def test_the_drafter_is_kept_as_it_was_when_it_measured_best(place, monkeypatch):
    scores, kept = iter([0.25, 0.75, 0.75, 0.5]), []

    def measure(*_: Any) -> np.ndarray:
        kept.append(files(place.out))
        hits = np.zeros((4, 7))
        hits[: int(4 * next(scores)), 0] = 1
        return hits

    monkeypatch.setattr("dflash_mlx.train.acceptance.measure", measure)
    place.train(steps=3, evaluate_minutes=1e-9)
    assert [record["by_prefix"] for record in place.history()] == [[0.25], [0.75], [0.75], [0.5]]
    first, best, last = kept[1], kept[2], files(place.out)
    for name in ("model.safetensors", "config.json"):
        assert last[name] == best[name]
    assert best["model.safetensors"] != first["model.safetensors"]


# Going on


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(place, monkeypatch):
    options = {"steps": 4, "evaluate_minutes": 1e-9, "mode": "variable-prefix", "block_size": 4}
    place.train(out=place.root / "through", **options)
    losses = Trainer.losses

    def interrupted(self: Trainer) -> Iterator[float]:
        yield from islice(losses(self), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "losses", interrupted)
        place.train(**options)
    assert [record["step"] for record in place.history()] == [0, 1, 2]
    place.train(**options)
    assert [record["step"] for record in place.history()] == [0, 1, 2, 3, 4]
    found, expected = files(place.out), files(place.root / "through")
    assert found.keys() == expected.keys()
    for name in ("model.safetensors", "config.json"):
        assert found[name] == expected[name]
    again, through = (load_file(folder / STATE) for folder in (place.out, place.root / "through"))
    assert again.keys() == through.keys()
    assert all(again[name].tobytes() == through[name].tobytes() for name in again)


def test_a_finished_run_goes_on_with_more_steps_though_a_kill_spoiled_its_history(place):
    place.train(steps=2)
    before = files(place.out)
    place.train(steps=2)
    assert files(place.out) == before
    file = place.out / "history.jsonl"
    ahead = json.dumps({**place.history()[-1], "step": 9}) + "\n"  # its state was not yet saved
    for steps, added in ((3, ahead), (4, ahead[:15]), (5, "")):
        file.write_text(file.read_text() + added)
        place.train(steps=steps)
    assert [record["step"] for record in place.history()] == [0, 2, 3, 4, 5]
    file.write_text('{"steps": 2}\n')
    with pytest.raises(DFlashError, match="history.jsonl"):
        place.train(steps=6)


def test_a_run_that_was_stopped_before_its_first_save_begins_again(place):
    place.out.mkdir()
    (place.out / "history.jsonl").touch()
    (place.out / "model.safetensors").write_bytes(b"half")
    place.train(steps=2)
    assert (place.out / STATE).exists()
    shutil.rmtree(place.out / "state")  # by hand, to save space: the drafter is finished
    with pytest.raises(DFlashError, match="holds no run to continue"):
        place.train(steps=2)


# Starting from a drafter


def test_what_training_does_not_change_is_saved_as_it_was(place):
    init = place.drafter(
        note={"by": "me"}, dflash_config={"training_mode": "other", "num_anchors": 512}
    )
    place.train(init=init, learning_rate=1e-30, weight_decay=0.0, steps=1)
    weights, raw = place.read()
    given = json.loads((init / "config.json").read_text())
    del given["dflash_config"]["training_mode"]
    assert raw == {**given, "dtype": "bfloat16"}
    for name, array in random_drafter(given).items():
        rounded = np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
        assert np.array_equal(weights[name], rounded)


ALIKE = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
ALIKE |= {"dflash_config": {"target_layer_ids": [1]}}  # as a new one, but for the mask
OTHER_RUNS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "mode 'dflash', not 'variable-prefix'": lambda _: {"mode": "variable-prefix"},
    "seed 0, not 9": lambda _: {"seed": 9},
    "mask_token_id 5, not 8": lambda _: {"init": None},
    r"layer_windows \[None\], not \[None, None\]": lambda p: {
        "init": p.drafter(**{**ALIKE, "num_hidden_layers": 2})
    },
    "rope .*10000.*, not .*500000": lambda p: {"init": p.drafter(**ALIKE, rope_theta=5e5)},
    "data 'corpus-.*', not 'c-": lambda p: {"corpus": p.write("c.jsonl", corpus_rows()[:5])},
}


def test_a_run_is_not_continued_as_another_one(place):
    place.train(init=place.drafter(**ALIKE), steps=2)
    before = files(place.out)
    for named, change in OTHER_RUNS.items():
        options = {"init": place.drafter(**ALIKE), **change(place)}
        with pytest.raises(DFlashError, match=named) as failure:
            place.train(**options, steps=3)
        assert str(place.out) in failure.value.what and "--out" in failure.value.next_step
        assert files(place.out) == before
    place.train(init=place.drafter(**ALIKE), steps=3)


# Refusals, before work starts and without touching a file

Change = Callable[[Place], dict[str, Any]]


def long(row: CorpusRow) -> CorpusRow:
    return replace(row, answer=row.answer * 8)


def corpus(*rows: CorpusRow, **header: Any) -> Change:
    """Train on these rows."""
    return lambda place: {"corpus": place.write("c.jsonl", rows, replace(place.header, **header))}


REFUSED: dict[str, tuple[Change | dict[str, Any], str]] = {
    "another tokenizer": (corpus(*corpus_rows(), tokenizer="0"), "c.jsonl .*tiny.* other tokens"),
    "another vocabulary": (corpus(*corpus_rows(), vocab_size=98), "98 tokens, .* has 97"),
    "rows that are too long": (corpus(*map(long, corpus_rows())), f"c.jsonl .* {CONTEXT} tokens"),
    "a single row": (corpus(corpus_rows()[0]), "one row in all"),
    "too little room for features": ({"cache_gb": 1e-6}, "1000 bytes"),
    "a drafter of another target": (
        lambda p: {"init": p.drafter(num_target_layers=30)},
        "target layers 30, .* has 3",
    ),
    "no drafter": (lambda p: {"init": p.root}, "config.json"),
    "a folder of other files": (lambda p: {"out": p.root}, "no run to continue"),
    "a file in its place": (lambda p: {"out": p.corpus}, "no run to continue"),
    "neither steps nor minutes": ({"steps": None}, "no end"),
    "steps and minutes": ({"minutes": 1}, "two ends"),
    "more layers than there are, of no kind": (
        {"layers": 999, "start": "random"},
        "--layers is 999",
    ),
    "more taps than there are": ({"taps": 999}, "--taps is 999"),
    "prefixes that leave no draft": (
        {"mode": "variable-prefix", "least_prefix": 7},
        "--least-prefix is 7",
    ),
    "no model": (lambda p: {"model": p.root / "no"}, "no"),
    "more layers than a masked drafter can have": (
        {"mode": "specdiff", "layers": 9},
        "--layers is 9",
    ),
    "taps where none are read": ({"mode": "specdiff", "taps": 5}, "--taps is 5, .* no layers"),
    "two layers of EAGLE-3": ({"mode": "eagle3", "layers": 2}, "--layers is 2"),
    "two layers of a head": ({"mode": "mtp", "layers": 2}, "--layers is 2"),
    "three taps of a head": ({"mode": "mtp", "taps": 3}, "--taps is 3"),
    "a drafter of another family": (
        lambda p: {"mode": "eagle3", "init": p.drafter()},
        "'DFlashDraftModel', supported are LlamaForCausalL",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_with_is_refused_in_one_sentence(place, monkeypatch, capsys, case):
    change, named = REFUSED[case]
    options = change if isinstance(change, dict) else change(place)
    before = files(place.root)
    monkeypatch.setattr("sys.argv", ["train", *place.words(**options)])
    with pytest.raises(SystemExit) as left:
        cli.run(main, "dflash_mlx.train")
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    (sentence,) = [line for line in said.err.splitlines() if line.startswith("dflash_mlx.train: ")]
    assert re.search(named + ".*; ", sentence), "the value, and then the next step"
    after = files(place.root)
    assert {name: after[name] for name in before} == before
    assert not (place.root / "out").exists()


NUMBERS = {
    main: ["soft nan", "soft 1.5", "reveal_share 1.5", "cache_gb inf", "cache_gb 0", "held_out 1"]
    + ["block_size 999"],
    selector.main: ["rank 0", "seed -1", "minutes inf", "learning_rate nan", "top_k 1"],
    collect.main: ["temperature nan", "temperature 11", "limit 0", "greedy_share 1.5", "top_p 0"],
}


@pytest.mark.parametrize(
    ("command", "given"), [(main, each) for main, those in NUMBERS.items() for each in those]
)
def test_a_number_out_of_its_range_is_refused_before_anything_is_read(tmp_path, command, given):
    name, number = given.split()
    words = ["--out", str(tmp_path / "out"), f"--{name.replace('_', '-')}", number]
    more = ["--prompts=no"] if command is collect.main else ["--corpus=no"]
    more += ["--drafter=no"] if command is selector.main else []
    with pytest.raises(DFlashError, match=f"{name} is {number}") as failure:
        command([*words, *more])
    assert failure.value.next_step and failure.value.setting == name
    assert not list(tmp_path.iterdir())


def test_without_a_folder_features_go_to_the_users_cache_of_now(place, monkeypatch):
    now = place.root / "now"
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: now / name)
    read_texts(DataConfig((place.corpus,)), load_target(str(place.model)), (0, 2))
    assert [f.name for f in (now / "dflash-chat").iterdir()] == ["features"]
