"""The benchmark on a tiny pair: its report, and what it refuses."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.benchmark import measure
from dflash_mlx.core.errors import DFlashError

METHODS = ["none", "dflash:4", "dflash:8"]
FIGURES = """
    tokens_per_second speedup slowest intervals ratio_of_medians mean_accepted rows_per_round
    acceptance_rate accepted_by_position committed modes guard parity
    first_differences round_ms
"""


@pytest.fixture(scope="module")
def measured(bench, tmp_path_factory) -> dict[str, Any]:
    """The report of a run, and the methods of its answers, in order."""
    order, real = [], measure.answer
    with pytest.MonkeyPatch.context() as patch:

        def answer(pair: Any, prompt: list[int], config: Any) -> Any:
            order.append(config.block_size or config.method)
            return real(pair, prompt, config)

        patch.setattr(measure, "answer", answer)
        file = tmp_path_factory.mktemp("report") / "report.json"
        more = ["--methods", ",".join(METHODS[1:]), "--max-tokens", "12"]
        return {"order": order, "report": bench.run(file, *more)}


def test_the_report_says_what_was_measured_on_what(measured, bench):
    report = measured["report"]
    said = {"machine", "versions", "pair", "settings", "methods", "categories", "finished"}
    assert report.keys() == said and report["finished"] is True
    assert report["machine"].keys() >= {"processor", "system", "device", "cores", "memory_bytes"}
    assert report["versions"].keys() >= {"python", "mlx", "mlx-lm"}
    named = {"target": str(bench.root / "model"), "drafter": str(bench.root / "drafter")}
    assert report["pair"].items() >= {**named, "drafters": [named["drafter"]]}.items()
    settings = report["settings"]
    told = {"prompts": 4, "prompts_file": "prompts.jsonl", "limit": None}
    assert settings.items() >= told.items()
    assert list(settings["methods"]) == METHODS, "none is always run"
    for name, config in settings["methods"].items():
        assert name.startswith(config["method"])
        assert (config["max_tokens"], config["sampling"]["temperature"]) == (12, 0)


def test_every_method_has_every_figure_and_gives_the_plain_answers(measured):
    report = measured["report"]
    groups = {"all": report["methods"], **report["categories"]}
    assert list(groups) == ["all", "code", "chat"]
    assert all(list(group) == METHODS for group in groups.values())
    for name, figures in (each for group in groups.values() for each in group.items()):
        assert list(figures) == FIGURES.split()
        assert figures["tokens_per_second"] > 0 and figures["speedup"] > 0
        terms = figures["round_ms"]
        assert list(terms) == ["draft", "verify", "commit", "overhead"]
        assert min(terms.values()) >= 0 and terms["verify"] > 0
        assert name == "none" or terms["draft"] > 0.01
        assert (figures["parity"], figures["first_differences"]) == (1.0, [])
    positions = [len(f["accepted_by_position"]) for f in report["methods"].values()]
    assert positions == [0, 3, 7]
    plain = report["methods"]["none"]
    assert (plain["speedup"], plain["mean_accepted"], plain["acceptance_rate"]) == (1.0, 1.0, 0.0)
    usual = ["none", 4, 8]  # the order turns from prompt to prompt
    assert measured["order"] == usual + sum([usual[i % 3 :] + usual[: i % 3] for i in range(4)], [])


CUT = "d2sd:branches=2:budget=6"
TREES = ["d2sd:growth=paper", "d2sd:branches=2", CUT, "ddtree:budget=8", "resample:branches=2"]


@pytest.fixture(scope="module")
def trees(bench, tmp_path_factory) -> dict[str, Any]:
    """The report of sampled answers of trees, and what was printed."""
    file = tmp_path_factory.mktemp("trees") / "report.json"
    with redirect_stdout(io.StringIO()) as out:
        more = ["--methods", ",".join(["dflash", *TREES])]
        more += ["--temperature", "0.7", "--limit", "1"]
        report = bench.run(file, *more)
        return {**report, "printed": out.getvalue()}


def test_random_answers_of_every_method_are_the_plain_ones_with_that_seed(trees):
    assert list(trees["methods"]) == ["none", "dflash", *TREES]
    assert trees["settings"]["prompts"] == 2, "one of each category"
    tokens = set()
    for figures in trees["methods"].values():
        assert figures["parity"] == 1.0 and figures["mean_accepted"] >= 1
        tokens.add(sum(int(n) * rounds for n, rounds in figures["committed"].items()))
    assert len(tokens) == 1 and trees["methods"]["none"]["committed"] == {"1": tokens.pop()}
    settings = trees["settings"]["methods"]
    assert settings[CUT]["budget"] == 6
    assert isinstance(settings["none"]["sampling"]["seed"], int)
    assert f"| all      | {CUT} |" in trees["printed"]


def test_auto_goes_by_what_it_is_with_the_pair_and_contexts_stand_side_by_side(
    bench, tmp_path, capsys
):
    more = ["--methods", "auto:budget=4,auto:budget=8", "--limit", "1", "--max-tokens", "2"]
    report = bench.run(tmp_path / "report.json", *more, "--context", "60,200")
    assert list(report["methods"]) == ["none", "ddtree:budget=4", "ddtree:budget=8"]
    assert list(report["categories"]) == ["60 tokens", "200 tokens"]
    lengths = report["settings"]["prompt_tokens"]
    assert lengths["asked"] == [60, 200] and 190 < lengths["longest"] <= 200
    assert f"to {lengths['longest']} tokens" in capsys.readouterr().out


# What is refused


@pytest.mark.parametrize(
    ("more", "value"),
    [
        (["--methods", "none,dflash", "--context", "600"], "512"),
        (["--methods", "dflash:9"], "block_size is 9"),
    ],
)
def test_what_the_pair_cannot_do_is_refused_before_anything_is_measured(
    bench, monkeypatch, more, value
):
    monkeypatch.setattr(measure, "answer", lambda *_: pytest.fail("measured"))
    with pytest.raises(DFlashError, match=value):
        benchmark.main(bench.options(*more))


GOOD = '{"category": "code", "prompt": "x = 1"}\n'


def test_prompts_come_from_standard_input(bench, tmp_path, monkeypatch):
    rows = (bench.root / "prompts.jsonl").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(rows)))
    more = ["--prompts", "-", "--limit", "1", "--methods", "dflash:4"]
    settings = bench.run(tmp_path / "report.json", *more)["settings"]
    assert (settings["prompts"], settings["prompts_file"]) == (2, "standard input")


@pytest.mark.usefixtures("no_pair")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--json", "nowhere/report.json"], "nowhere/"),
        (["--json", "."], "folder"),
        (["--json", "prompts.jsonl", "--prompts", "prompts.jsonl"], "prompts.jsonl"),
        (["--methods", "dflash", "--budget", "8"], "budget is 8"),
        (["--limit", "0"], "limit is 0"),
        (["--methods", "none,dflash:1"], "block_size is 1"),
        (["--methods", "ddtree:budget=1"], "budget is 1"),
        (["--resume"], "--resume"),
    ],
)
def test_bad_options_are_refused_before_the_pair_is_loaded(
    bench, more, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(GOOD)
    with pytest.raises(DFlashError, match=message) as failure:
        benchmark.main(bench.options(*more))
    assert failure.value.next_step
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"prompts.jsonl": GOOD}
