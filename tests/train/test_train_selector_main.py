"""`python -m dflash_mlx.train.selector` on a tiny model: what it leaves, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from dflash_mlx import load
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import SelectedPath
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.paths import SelectorConfig
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.networks.tensors import parameters_of
from dflash_mlx.train import compare, selector
from dflash_mlx.train.compare import measure, walk
from dflash_mlx.train.config import SelectorTraining
from dflash_mlx.train.dflash import DFlashTrainee
from support.drafter_formats import speculators
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash2 import random_tensors, tiny_config
from support.tiny_training import (
    Place,
    corpus_rows,
    decoded,
    drafter_config,
    files,
    make_trainee,
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
    make_trainee(RAW).save(place.root / "drafter")
    run(place, steps=100, learning_rate=0.015, warmup=5, anchors=16, sequences=4)
    return place


def figures(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if "tokens/round" in line]


def test_the_command_prints_both_figures_and_writes_a_folder(place, capsys):
    place.drafter(block_size=6)
    given = files(place.root / "drafter")
    run(place, top_k=16, draft_vocabulary=None)
    printed = capsys.readouterr().err
    assert printed.count("the draft vocabulary covers") == 1
    without, with_one = figures(printed)
    assert without.startswith("without a selector: ") and with_one.startswith("with one: ")
    assert "| by position " in without and "| by position " in with_one
    assert set(files(place.out)) == {"config.json", "model.safetensors"}
    assert files(place.root / "drafter") == given


def test_of_a_drafter_that_sees_prefixes_it_prints_what_follows_each(place, capsys):
    place.drafter(block_size=6, dflash={"training_mode": "vp_drafter"})
    run(place, top_k=16, draft_vocabulary=None)
    for line in figures(capsys.readouterr().err):
        assert len(line.partition("| continuation by prefix ")[2].split()) == 5


def test_a_trained_folder_accepts_more_and_is_compared_with_the_drafter_it_was(trained, tmp_path):
    drafter, report = trained.root / "drafter", tmp_path / "figures.json"
    unwanted = dict.fromkeys(("out", "steps", "sequences", "anchors", "layers", "held_out"))
    named = ["--drafter", str(drafter), "--drafter", str(trained.out), "--all-rows"]
    compare.main([*trained.words(**{**unwanted, "json": report}), *named])
    told = json.loads(report.read_text())
    first, second = (told[str(f)]["all"]["tokens_per_round"] for f in (drafter, trained.out))
    assert first < 1.5 and second > first + 0.5


def test_decoding_accepts_what_was_measured(trained, tmp_path):
    rows = [row for row in corpus_rows() if row.temperature == 0]
    pair = load(str(trained.model), str(trained.out))
    config = pair.drafters[0].config
    assert (config.selector, config.block_size) == (SelectorConfig(16, 97), 6)
    drafter = make_drafter(pair, DecodeConfig("dflash", 6))
    assert isinstance(drafter, SelectedPath)
    answers = [decoded(pair.target, drafter, row) for row in rows]
    assert [tuple(sum(map(list, rounds), [])) for rounds in answers] == [r.answer for r in rows]
    walked = walk(DFlashTrainee.read(trained.out, tiny_target()), texts_of(tmp_path, rows))
    lengths: list[int] = []
    for (_, *rounds), hits, row in zip(answers, walked.by_text, rows, strict=True):
        left = len(row.answer) - 1
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
    drafter, texts = DFlashTrainee.read(trained.out, tiny_target()), texts_of(tmp_path, rows)
    first = [measure(drafter, texts, prefix).by_position[0] for prefix in range(4)]
    assert min(first) > 0.4


def test_a_second_run_begins_with_the_drafter_alone(trained, tmp_path, capsys):
    """A selector that is there is left out, and the new one is as if it had not been."""
    options = {"top_k": 8, "rank": 4, "steps": 3, "held_out": 2}  # some of which were learned
    run(trained, out=tmp_path / "once", **options)
    once = capsys.readouterr().err
    run(trained, drafter=trained.out, out=tmp_path / "again", **options)
    again = capsys.readouterr().err
    assert figures(once) == figures(again) and len(figures(once)) == 2
    first, second = files(tmp_path / "once"), files(tmp_path / "again")
    assert first["model.safetensors"] == second["model.safetensors"]
    trained.train(init=trained.out, out=tmp_path / "first", layers=None, steps=1)
    assert FILES.read_config(tmp_path / "first").selector is None


def test_a_drafter_of_speculators_gets_a_selector(place, tiny_model):
    write_drafter_folder(place.root / "drafter", speculators(), random_drafter(RAW))
    run(place)
    assert FILES.read_config(place.out).selector == SelectorConfig(16, 97)
    load(str(tiny_model), str(place.out))


# What it refuses

BAD = [
    ("top_k", "1", "top_k is 1"),
    ("top_k", "98", "top_k is 98, .* 97 tokens"),
    ("rank", "0", "rank is 0"),
    ("minutes", "inf", "minutes is inf"),
    ("learning_rate", "nan", "learning_rate is nan"),
    ("steps", "0", "steps is 0"),
    ("draft_vocabulary", "0", "draft_vocabulary is 0"),
    ("draft_vocabulary", "96", "top_k is 97, .* 96 tokens"),
    ("held_out", "1", "held_out is 1"),
    ("seed", "-1", "seed is -1"),
    ("cache_gb", "0", "cache_gb is 0.0"),
    ("out", ".", "is there already"),
    ("out", "corpus.jsonl", "is there already"),
    ("drafter", "convolved", "convolutions"),
]


@pytest.mark.parametrize(("name", "value", "named"), BAD)
def test_bad_settings_are_refused_and_nothing_is_written(place, monkeypatch, name, value, named):
    monkeypatch.chdir(place.root)
    place.drafter()
    raw = tiny_config()
    write_drafter_folder(place.root / "convolved", raw, random_tensors(raw))
    before = files(place.root)
    with pytest.raises(DFlashError, match=named) as failure:
        run(place, **{name: value})
    assert failure.value.next_step
    assert files(place.root) == before and not place.out.exists()


def test_an_unknown_law_of_anchors_is_refused():
    with pytest.raises(DFlashError, match="anchor_law is 'x'"):
        SelectorTraining(anchor_law="x")


def test_a_selector_is_given_only_to_a_drafter_that_has_all_its_weights():
    whole, raw = make_trainee(RAW), drafter_config(block_size=6, num_hidden_layers=4)
    maps = selector.MappedSelector(tiny_target().embedding(), 97, 8, 0)
    with pytest.raises(ValueError, match=r"layers\.3"):
        selector.with_selector(replace(whole, raw=raw), maps, SelectorConfig(8, 5))
    made = selector.with_selector(whole, maps, SelectorConfig(8, 5)).network
    again = selector.with_selector(replace(whole, network=made), maps, SelectorConfig(8, 5))
    made.update(tree_map(mx.ones_like, made.parameters()))  # as if its convolutions did something
    idle = selector.with_selector(replace(whole, network=made), maps, SelectorConfig(8, 5))
    for name, array in parameters_of(idle.network).items():
        if "_conv." in name:
            assert mx.array_equal(array, parameters_of(again.network)[name])
