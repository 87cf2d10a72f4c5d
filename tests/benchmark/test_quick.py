"""The short benchmark of the chat: its prompts, its steps, its sentence, and what it saves."""

from __future__ import annotations

import errno
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from dflash_mlx.benchmark import quick
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.client import DFlashError, Pair, PairConfig, SamplingConfig, bench, load, save_bench
from dflash_mlx.client import what_pays as sentence
from dflash_mlx.drafters.methods import serving
from dflash_mlx.engine.pair import Capabilities
from support.models import write_drafter, write_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("bench")
    return load(str(write_model(root / "model")), str(write_drafter(root / "drafter")))


@pytest.fixture(scope="module")
def steps(pair: Pair) -> list[quick.BenchStep]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "TOKENS", 4)
        return list(bench(pair, PairConfig(), SamplingConfig(), ["dflash:4", "none"]))


def test_the_dozen_prompts_are_of_three_kinds_and_each_is_there_once():
    rows = read_prompts(quick.PROMPTS, None)
    assert Counter(row["category"] for row in rows) == {"math": 4, "code": 4, "chat": 4}
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 12


def test_by_default_every_method_takes_part_that_the_pair_serves():
    assert set(serving(Capabilities(("dflash",) * 2))) == {"ngram", "dflash", "ddtree", "d2sd"}
    assert set(serving(Capabilities(("dflash",), trees=False))) == {"ngram", "dflash"}
    assert serving(Capabilities()) == ("ngram",)


def test_every_answer_is_a_step_and_finished_prompts_have_figures(steps):
    assert max(step.answers for step in steps) == steps[0].of == 24
    assert [step.prompts for step in steps[:4]] == [0, 0, 1, 1]
    assert steps[1].report == {} and list(steps[2].report["methods"]) == ["none", "dflash:4"]
    report = steps[-1].report
    assert steps[-1].prompts == report["settings"]["prompts"] == 12
    assert list(report["categories"]) == ["math", "code", "chat"]
    assert report["settings"]["methods"]["none"]["max_tokens"] == 4


def test_methods_that_are_not_known_or_not_served_are_refused(pair):
    for name in ("magic", "dflash:99"):
        with pytest.raises(DFlashError, match=name.partition(":")[2] or name):
            next(bench(pair, PairConfig(), SamplingConfig(), [name]))


def report_of(**speedups: Any) -> dict[str, Any]:
    """speedups: of methods, over all and by category."""
    every = {"none": (1.0, 1.0, 1.0), **speedups}

    def figures(i: int) -> dict[str, Any]:
        return {m: {"speedup": s[i], "tokens_per_second": 10 * s[i]} for m, s in every.items()}

    return {"methods": figures(0), "categories": {"code": figures(1), "chat": figures(2)}}


def test_the_sentence_names_the_fastest_method_and_where_it_is_fastest():
    text = sentence(report_of(ddtree=(2.0, 2.5, 1.5), ngram=(1.2, 1.4, 1.0)), 2)
    for part in (
        "DFlash tree",
        "2.00 times",
        "20.0",
        "10.0",
        "most for code (2.50)",
        "chat (1.50)",
    ):
        assert part in text
    assert "\n" not in text and "; " not in text


@pytest.mark.parametrize("best", [0.7, 1.04])
def test_where_nothing_is_faster_the_sentence_says_so(best):
    text = sentence(report_of(ddtree=(best, 2.5, 0.5)), 2)
    assert "do not pay" in text and "10.0" in text


def test_it_is_saved_as_json_and_as_a_picture(steps, tmp_path):
    (file, picture), why = save_bench(steps[-1].report, tmp_path / "new", 12)
    assert json.loads(file.read_text())["finished"] is True
    assert (file.suffix, picture.suffix, why) == (".json", ".png", "")
    assert image.imread(picture).std() > 0.05
    (file, _), _ = save_bench(steps[2].report, tmp_path / "broken off", 1)
    stored = json.loads(file.read_text())
    assert stored["finished"] is False and stored["finished_prompts"] == 1


def test_without_matplotlib_there_is_no_picture_and_a_reason(steps, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (file,), why = save_bench(steps[-1].report, tmp_path, 12)
    assert file.is_file() and "matplotlib" in why


def test_a_disk_that_is_full_at_the_picture_keeps_the_figures(steps, tmp_path, monkeypatch):
    def refuse(figure, file, **_):
        file.write_bytes(b"half a picture")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", refuse)
    (file,), why = save_bench(steps[-1].report, tmp_path, 12)
    assert "No space left" in why and list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_made_is_named(steps, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DFlashError, match="file"):
        save_bench(steps[-1].report, Path(tmp_path / "file" / "below"), 12)
