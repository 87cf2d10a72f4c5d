"""Drafters side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train import compare
from dflash_mlx.train.corpus.rows import read_rows
from support.tiny_training import Place, drafter_config, make_trainee


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
    greedy = sum(row.temperature == 0 for row in read_rows(place.corpus)[1])
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
