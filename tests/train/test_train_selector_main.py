"""`python -m dflash_mlx.train.selector` on a tiny model: what it leaves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import dflash_mlx
from dflash_mlx.core.config import DecodeConfig, SelectorTraining
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.observer import Observer
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from dflash_mlx.drafters.dflash.save import save_drafter
from dflash_mlx.drafters.dflash.selector import SelectorConfig
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.selected import SelectedPath
from dflash_mlx.engine.decode import decode, prefill
from dflash_mlx.engine.state import State
from dflash_mlx.models.load import Pair
from dflash_mlx.train import compare, selector
from dflash_mlx.train.corpus.rows import Row
from dflash_mlx.train.evaluate import Drafter, measure, walk
from support.drafter_formats import speculators
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash2 import random_tensors, tiny_config
from support.tiny_training import (
    Place,
    corpus_rows,
    drafter_config,
    files,
    make_network,
    texts_of,
    tiny_target,
)

RAW = drafter_config(block_size=6)


def run(place: Place, **options: Any) -> None:
    given = {"drafter": place.root / "drafter", "layers": None, "rank": 16}
    given = {**given, "top_k": 97, "draft_vocabulary": 97}
    selector.main(place.words(**{**given, **options}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Place:
    """A folder that the command made from a random drafter and two answers."""
    place = Place(tmp_path_factory.mktemp("place"), tiny_model)
    save_drafter(place.root / "drafter", make_network(RAW)[0], RAW)
    run(place, steps=150, learning_rate=0.01, warmup=5, anchors=16, sequences=4)
    return place


def test_the_command_prints_both_figures_and_writes_a_folder(place, capsys):
    place.drafter(block_size=6)
    before = files(place.root / "drafter")
    run(place, top_k=16, draft_vocabulary=None)
    printed = capsys.readouterr().err.splitlines()
    lines = [line for line in printed if "tokens/round" in line]
    assert sum("the draft vocabulary covers" in line for line in printed) == 1
    assert [line.partition(":")[0] for line in lines] == ["without a selector", "with one"]
    assert all("| by position " in line for line in lines)
    assert set(files(place.out)) == {"config.json", "model.safetensors"}
    assert files(place.root / "drafter") == before


def test_a_trained_folder_accepts_more_and_is_compared_with_the_drafter_it_was(trained, tmp_path):
    drafter, report = trained.root / "drafter", tmp_path / "figures.json"
    unwanted = dict.fromkeys(("out", "steps", "sequences", "anchors", "layers", "held_out"))
    named = ["--drafter", str(drafter), "--drafter", str(trained.out), "--all-rows"]
    compare.main([*trained.words(**{**unwanted, "json": report}), *named])
    figures = json.loads(report.read_text())
    first, second = (figures[str(f)]["all"]["tokens_per_round"] for f in (drafter, trained.out))
    assert first < 1.5 and second > first + 0.5


def test_a_trained_folder_is_loaded_as_a_pair_that_follows_its_selector(trained):
    pair = dflash_mlx.load(str(trained.model), str(trained.out))
    assert pair.network_config is not None
    assert pair.network_config.selector == SelectorConfig(16, 97)
    assert pair.network_config.block_size == 6
    assert isinstance(make_drafter(pair, DecodeConfig("dflash")), SelectedPath)


def decoded(drafter: Any, row: Row) -> list[tuple[int, ...]]:
    """The tokens of every round of a greedy answer, decoded."""
    target, settings = tiny_target(), DecodeConfig(max_tokens=len(row.answer))
    state = State(target.new_cache(), drafter.new_context())
    prefill(target, drafter, state, list(row.prompt), settings, Observer())
    return [round.tokens for round in decode(target, drafter, state, settings, Observer())]


def test_decoding_accepts_what_was_measured(trained, tmp_path):
    rows = [row for row in corpus_rows() if row.temperature == 0]
    config = read_config(trained.out)
    network = load_network(trained.out, config, mx.float32)
    drafter = make_drafter(Pair(tiny_target(), None, network, config), DecodeConfig("dflash"))
    assert isinstance(drafter, SelectedPath)
    answers = [decoded(drafter, row) for row in rows]
    assert [tuple(sum(map(list, rounds), [])) for rounds in answers] == [r.answer for r in rows]
    walked = walk(Drafter(network, config, tiny_target()), texts_of(tmp_path, rows))
    lengths: list[int] = []
    for rounds, hits, row in zip(answers, walked.by_text, rows, strict=True):
        left = len(row.answer)
        for tokens, hit in zip(rounds, hits, strict=False):  # the ends may differ, see below
            if left < config.block_size:
                break  # the last rounds draft shorter blocks
            assert len(tokens) == 1 + hit.sum()
            lengths.append(len(tokens))
            left -= len(tokens)
    assert len(set(lengths)) > 2, "rounds of many lengths, so that a mistake would be seen"


def test_a_selector_goes_by_the_last_visible_token_of_a_prefix(trained, tmp_path):
    """What is drafted first behind a prefix depends on its last token, which decides there."""
    rows = [row for row in corpus_rows() if row.temperature == 0]
    config = read_config(trained.out)
    drafter = Drafter(load_network(trained.out, config, mx.float32), config, tiny_target())
    texts = texts_of(tmp_path, rows)
    first = [measure(drafter, texts, prefix).by_position[0] for prefix in range(4)]
    assert min(first) > 0.4


def test_a_second_run_begins_with_the_drafter_alone(trained, tmp_path, capsys):
    """A selector that is there is left out, and the new one is as if it had not been."""
    options = {"top_k": 8, "rank": 4, "steps": 3, "held_out": 2}  # some of which were learned
    run(trained, out=tmp_path / "once", **options)
    once = capsys.readouterr().err
    run(trained, drafter=trained.out, out=tmp_path / "again", **options)
    again = capsys.readouterr().err
    figures = [
        [line for line in said.splitlines() if "tokens/round" in line] for said in (once, again)
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 2
    first, second = files(tmp_path / "once"), files(tmp_path / "again")
    assert first["model.safetensors"] == second["model.safetensors"]


@pytest.mark.parametrize("mode", ["dflash", "variable-prefix"])
def test_training_goes_on_from_such_a_folder_as_version_1(trained, place, mode):
    place.train(init=trained.out, mode=mode, layers=None, steps=3)
    weights, raw = place.read()
    given = json.loads((trained.root / "drafter" / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["block_size"] == 6
    method = {"training_mode": "vp_drafter"} if mode == "variable-prefix" else {}
    assert raw == {
        **given,
        "dtype": "bfloat16",
        "dflash_config": {**given["dflash_config"], **method},
    }
    assert weights.keys() == random_drafter(given).keys()
    assert read_config(place.out).selector is None


def test_a_drafter_of_speculators_gets_a_selector(place, tiny_model):
    raw = speculators()
    write_drafter_folder(place.root / "drafter", raw, random_drafter(RAW))
    run(place)
    assert read_config(place.out).selector == SelectorConfig(16, 97)
    dflash_mlx.load(str(tiny_model), str(place.out))


# What it refuses

SETTINGS = {
    "top_k": [
        ("1", "top_k is 1; choose 2 or more"),
        ("98", "top_k is 98, more than the 97 tokens of the draft"),
    ],
    "rank": [("0", "rank is 0; choose 1 or more")],
    "minutes": [("0", "minutes is 0.0; choose a number above 0"), ("inf", "minutes is inf")],
    "learning_rate": [("0", "learning_rate is 0.0"), ("nan", "learning_rate is nan")],
    "steps": [("0", "steps is 0; choose 1 or more")],
    "sequences": [("0", "sequences is 0")],
    "anchors": [("0", "anchors is 0")],
    "draft_vocabulary": [
        ("0", "draft_vocabulary is 0; choose 1 or more"),
        ("96", "top_k is 97, more than the 96 tokens of the draft vocabulary"),
    ],
    "held_out": [("1", "held_out is 1; choose 2 or more")],
    "warmup": [("-1", "warmup is -1; choose 0 or more")],
    "seed": [("-1", "seed is -1")],
    "cache_gb": [("0", "cache_gb is 0.0")],
}
BAD = [(name, *case) for name, cases in SETTINGS.items() for case in cases]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_settings_are_refused_and_nothing_is_written(place, name, value, message):
    place.drafter()
    before = files(place.root)
    with pytest.raises(DFlashError, match=message) as failure:
        run(place, **{name: value})
    assert failure.value.next_step
    assert files(place.root) == before and not place.out.exists()


def test_an_unknown_law_of_anchors_is_refused():
    with pytest.raises(DFlashError, match="anchor_law is 'x'; choose one of even, starts"):
        SelectorTraining(anchor_law="x")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_out_that_holds_something_is_refused_and_kept(place, kind):
    place.drafter()
    if kind == "folder":
        place.out.mkdir()
    (place.out / "note" if kind == "folder" else place.out).write_text("mine")
    before = files(place.root)
    with pytest.raises(DFlashError, match="out is there already; choose another folder with --out"):
        run(place)
    assert files(place.root) == before


def test_a_drafter_with_convolutions_is_refused_and_nothing_is_written(place):
    raw = tiny_config()
    write_drafter_folder(place.root / "drafter", raw, random_tensors(raw))
    before = files(place.root)
    with pytest.raises(DFlashError, match="holds a DFlash 2 drafter with convolutions") as failure:
        run(place)
    assert failure.value.next_step and files(place.root) == before
