"""A benchmark that is broken off keeps what is finished, and a later one goes on with it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.benchmark import measure
from dflash_mlx.benchmark.measure import RoundSize, Run
from dflash_mlx.benchmark.report import describe, finished_runs, read_report, save, settings
from dflash_mlx.benchmark.selection import BenchmarkPrompt
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.core.tree import NearTies
from dflash_mlx.drafters.methods import settle
from dflash_mlx.engine.exact import Difference
from dflash_mlx.engine.pair import Capabilities, Pair
from support.configs import config_with
from support.toys import ToyTarget

METHODS = "ddtree:budget=4,dflash:4"
ASKED = ["--methods", METHODS, "--temperature", "0.8"]


@pytest.fixture(scope="module")
def broken_off(bench, tmp_path_factory) -> str:
    """The report of a run that Ctrl+C broke off in the middle of its third prompt."""
    report, left = tmp_path_factory.mktemp("broken") / "report.json", [3 + 3 * 2 + 1]
    real = measure.answer

    def answer(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(measure, "answer", answer)
        bench.run(report, *ASKED)
    return report.read_text()


@pytest.fixture
def interrupted(broken_off: str, tmp_path: Path) -> Path:
    file = tmp_path / "report.json"
    file.write_text(broken_off)
    return file


def counted(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report does not depend on the clock."""
    timed = ("round_ms", "tokens_per_second", "speedup", "slowest", "intervals", "ratio_of_medians")
    groups = {"all": report["methods"], **report["categories"]}
    return {
        group: {
            name: {key: value for key, value in figures.items() if key not in timed}
            for name, figures in methods.items()
        }
        for group, methods in groups.items()
    }


def test_what_was_finished_before_ctrl_c_is_in_the_report(broken_off):
    report = json.loads(broken_off)
    assert report["finished"] is False
    assert [run["method"] for run in report["runs"]] == ["none", *METHODS.split(",")] * 2
    assert report["settings"]["prompts"] == 4
    assert list(report["categories"]) == ["code"], "figures of what is there"


def test_a_resumed_run_gives_what_one_run_would_have_and_is_shown_again(
    interrupted, bench, tmp_path, monkeypatch, capsys
):
    asked, real = [], measure.answer

    def answer(pair: Any, prompt: Any, config: Any) -> Any:
        asked.append((tuple(prompt), config.max_tokens))
        return real(pair, prompt, config)

    seed = json.loads(interrupted.read_text())["settings"]["sampling"]["seed"]
    with monkeypatch.context() as patch:
        patch.setattr(measure, "answer", answer)
        resumed = bench.run(interrupted, *ASKED, "--resume")
    assert resumed["finished"] is True and "runs" not in resumed
    assert len({prompt for prompt, most in asked if most == 6}) == 2, "only what was missing"
    whole = bench.run(tmp_path / "whole.json", *ASKED, "--seed", str(seed))
    assert counted(resumed) == counted(whole)
    printed = capsys.readouterr().out
    monkeypatch.setattr(measure, "answer", lambda *_: pytest.fail("measured again"))
    more = [*ASKED, "--seed", str(seed), "--resume"]
    assert bench.run(tmp_path / "whole.json", *more) == whole
    assert printed.endswith(capsys.readouterr().out)


SHORT = ["--methods", "dflash:4", "--limit", "1", "--max-tokens", "2"]


def test_a_report_and_its_table_do_not_take_each_other(bench, tmp_path, monkeypatch, capsys):
    def leave(report: Any) -> str:
        raise BrokenPipeError

    def refuse(file: Path, report: Any, runs: Any = None) -> None:
        if runs is None:
            raise DFlashError("the disk is full", "free some space")

    with monkeypatch.context() as patch, pytest.raises(BrokenPipeError):
        patch.setattr(benchmark, "format_report", leave)  # nobody reads what is printed
        bench.run(tmp_path / "report.json", *SHORT)
    assert json.loads((tmp_path / "report.json").read_text())["finished"] is True
    monkeypatch.setattr(benchmark, "save", refuse)
    with pytest.raises(DFlashError, match="the disk is full"):
        bench.run(tmp_path / "report.json", *SHORT)
    assert "| all      | none " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (["--max-tokens", "7"], ["max_tokens", "6", "7"]),
        (["--methods", "dflash:4"], ["ddtree"]),
        (["--seed", "1"], ["seed", "1"]),
        (["--limit", "1"], ["limit", "1"]),
        (["--drafter-bits", "8"], ["drafter_bits", "8"]),
        (["--prompts", "other.jsonl"], ["prompts"]),
    ],
)
def test_other_settings_are_refused_with_what_is_other(
    interrupted, bench, monkeypatch, tmp_path, more, values
):
    monkeypatch.chdir(tmp_path)
    rows = (bench.root / "prompts.jsonl").read_text()
    (tmp_path / "other.jsonl").write_text(rows.replace("hello", "hello!"))
    before = interrupted.read_text()
    monkeypatch.setattr(measure, "answer", lambda *_: pytest.fail("measured"))
    with pytest.raises(DFlashError) as failure:
        bench.run(interrupted, *ASKED, "--resume", *more)
    assert all(value in failure.value.what for value in [*values, str(interrupted)])
    assert interrupted.read_text() == before


def test_another_draft_model_is_refused_be_it_the_second(tmp_path):
    reports = [
        describe(Pair(ToyTarget(4), None, drafter_name="A", drafter_names=names), PairConfig())
        for names in (("A", "B"), ("A", "C"))
    ]
    with pytest.raises(DFlashError, match="drafters .*'B'.*, and now it is .*'C'"):
        finished_runs(*reports, [], tmp_path / "report.json")


def test_a_methods_own_settings_are_told_among_the_others():
    methods = {name: DecodeConfig(name) for name in ("d2sd", "eagle3", "specdiff", "dflash")}
    methods["asked"] = settle(config_with("eagle3", branches=5), Capabilities())
    told = settings([BenchmarkPrompt("1", "chat", [1])], methods, SamplingConfig())["methods"]
    branches = {name: config.get("branches") for name, config in told.items()}
    assert branches == {**dict.fromkeys(methods), "asked": 5}


BAD_REPORTS = {
    "nothing": None,
    "no JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "an older report": json.dumps({"settings": {"sampling": {}}}),
    "no settings": json.dumps({"finished": False}),
    "settings of another kind": json.dumps({"finished": False, "settings": {"sampling": 1}}),
}


@pytest.mark.usefixtures("no_pair")
@pytest.mark.parametrize("case", BAD_REPORTS)
def test_what_is_no_report_is_refused_before_the_pair_is_loaded(bench, tmp_path, case):
    file, contents = tmp_path / "report.json", BAD_REPORTS[case]
    if contents is not None:
        file.write_text(contents)
    with pytest.raises(DFlashError, match="report.json"):
        bench.run(file, "--resume")


def test_a_run_comes_back_from_a_report_as_it_was(tmp_path):
    question = BenchmarkPrompt("1", "code", [1, 2], 60)
    plain = Statistics("none", generated_tokens=5, decode_seconds=2.0)
    own = Statistics(
        "ddtree",
        generated_tokens=5,
        rounds=2,
        decode_seconds=1.25,
        drafted=Counter({1: 4, 2: 3}),
        accepted=Counter({1: 2}),
        modes=Counter({"tree": 1, "plain": 1}),
        near_ties=NearTies(1, 2, 3, 4, 0.5),
    )
    rounds = (RoundSize(3, 8), RoundSize(2, 1))
    runs = [
        Run(question, "none", plain, {"verify": 2.0}, rounds[1:], plain, None),
        Run(question, "ddtree", own, {"draft": 0.1}, rounds, plain, Difference(3, 0.5)),
    ]
    report = {"settings": {"methods": {"none": {}, "ddtree": {}}, "sampling": {}}}
    save(tmp_path / "report.json", report, runs)
    before = read_report(tmp_path / "report.json")
    assert finished_runs(before, report, [question], tmp_path / "report.json") == runs
    del before["runs"][1]["statistics"]
    with pytest.raises(DFlashError, match="report.json is damaged"):
        finished_runs(before, report, [question], tmp_path / "report.json")
