"""Pictures of runs, and drafters side by side."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train import compare
from dflash_mlx.train.corpus.rows import read_rows
from dflash_mlx.train.plot import plot_history
from dflash_mlx.train.run import Record
from support.reference_dflash import random_drafter, write_drafter_folder
from support.tiny_training import Place, drafter_config, write_target


def record(step: int, prefixes: int) -> Record:
    share = [0.5 / (k + 1) for k in range(7)]
    loss = None if step == 0 else 4.0 / step
    return Record(step, step / 10, loss, 100.0, share, [0.4] * prefixes)


# Pictures


@pytest.mark.parametrize("prefixes", [1, 7], ids=["dflash", "variable prefix"])
@pytest.mark.parametrize("steps", [(0,), (0, 5, 9)], ids=["the first measurement", "a run"])
def test_a_run_is_drawn_as_a_png(tmp_path, prefixes, steps):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    plot_history([record(step, prefixes) for step in steps], tmp_path / "run.png")
    data = (tmp_path / "run.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 and height > 300


def test_without_matplotlib_the_next_step_is_named(tmp_path, monkeypatch):
    import_module = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_module(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DFlashError, match="matplotlib"):
        plot_history([record(0, 1)], tmp_path / "run.png")


# Side by side


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"), write_target(tmp_path_factory.mktemp("model")))


def drafter(place: Place, name: str, seed: int = 0, **changes: object) -> Path:
    raw = drafter_config(**changes)
    return write_drafter_folder(place.root / name, raw, random_drafter(raw, seed))


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
    assert len(lines) == 2 + 4
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert f"{first} (all)" in lines[2]


def test_all_rows_may_be_compared(place):
    folder = drafter(place, "a")
    run(place, folder, held_out=None, json=place.root / "j", more=("--all-rows",))
    greedy = sum(row.temperature == 0 for row in read_rows(place.corpus)[1])
    assert json.loads((place.root / "j").read_text())[str(folder)]["all"]["texts"] == greedy < 7


def test_drafters_that_read_different_layers_are_refused(place):
    other = drafter(place, "c", dflash={"target_layer_ids": [0, 1]})
    with pytest.raises(DFlashError, match="read different layers; compare them one by one"):
        run(place, drafter(place, "a"), other)


@pytest.mark.parametrize("held_out", [0, 1, -3])
def test_a_share_that_keeps_nothing_out_is_refused(place, held_out):
    with pytest.raises(DFlashError, match=f"held_out is {held_out}; choose 2 or more"):
        run(place, drafter(place, "a"), held_out=held_out)


def test_a_report_without_a_folder_is_refused_before_anything_is_measured(place):
    with pytest.raises(DFlashError, match="nowhere/j.json is a folder or in none; name a file"):
        run(place, place.root / "no drafter", json=place.root / "nowhere" / "j.json")


def test_a_picture_without_a_folder_is_refused_before_training(place):
    with pytest.raises(DFlashError, match="is a folder or in none"):
        place.train(plot=place.root, steps=1)
    assert not place.out.exists()
