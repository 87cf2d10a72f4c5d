"""A benchmark that is broken off keeps what is finished, and a later one goes on with it."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.benchmark import measure
from dflash_mlx.benchmark.measure import RoundSize, Run
from dflash_mlx.benchmark.prompts import BenchmarkPrompt
from dflash_mlx.benchmark.report import describe, finished_runs, read_report, save, settings
from dflash_mlx.core.accept import NearTies
from dflash_mlx.core.config import DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.statistics import Statistics
from dflash_mlx.drafters.methods import settle
from dflash_mlx.engine.pair import Capabilities, Pair
from dflash_mlx.engine.parity import Difference
from support.configs import config_with
from support.models import write_drafter, write_model
from support.toys import ToyTarget

ROWS = [
    {"id": str(i), "category": "ab"[i % 2], "prompt": text}
    for i, text in enumerate(["hello", "how are you?", "x = 1", "def f():"])
]
METHODS = "ddtree:budget=4,dflash:4"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("benchmark")
    write_model(root / "model")
    write_drafter(root / "drafter")
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return root


def options(folders: Path, report: Path, *more: str) -> list[str]:
    return [
        *("--model", str(folders / "model"), "--drafter", str(folders / "drafter")),
        *("--prompts", str(folders / "prompts.jsonl"), "--json", str(report)),
        *("--methods", METHODS, "--max-tokens", "6", *more),
    ]


def run(folders: Path, report: Path, *more: str) -> dict[str, Any]:
    benchmark.main(options(folders, report, *more))
    return json.loads(report.read_text())


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch, folders: Path, tmp_path: Path) -> Path:
    """The report of a run that Ctrl+C broke off in the middle of its third prompt."""
    report, real, left = tmp_path / "report.json", measure.answer, [3 + 3 * 2 + 1]

    def answer(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "answer", answer)
        with pytest.raises(KeyboardInterrupt):
            benchmark.main(options(folders, report, "--temperature", "0.8"))
    return report


def counted(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report does not depend on the clock."""
    timed = ("tokens_per_second", "speedup", "intervals", "ratio_of_medians", "round_ms")
    groups = {"all": report["methods"], **report["categories"]}
    return {
        group: {
            name: {key: value for key, value in figures.items() if key not in timed}
            for name, figures in methods.items()
        }
        for group, methods in groups.items()
    }


def test_what_was_finished_before_ctrl_c_is_in_the_report(interrupted):
    report = json.loads(interrupted.read_text())
    assert report["finished"] is False
    assert [run["method"] for run in report["runs"]] == ["none", *METHODS.split(",")] * 2
    assert report["settings"]["prompts"] == len(ROWS)
    assert list(report["categories"]) == ["a"], "figures of what is there"


def test_a_resumed_run_gives_what_one_run_would_have(interrupted, folders, tmp_path, monkeypatch):
    asked, real = [], measure.answer

    def answer(pair: Any, prompt: Any, config: Any) -> Any:
        asked.append((tuple(prompt), config.max_tokens))
        return real(pair, prompt, config)

    seed = json.loads(interrupted.read_text())["settings"]["sampling"]["seed"]
    monkeypatch.setattr(measure, "answer", answer)
    resumed = run(folders, interrupted, "--temperature", "0.8", "--resume")
    assert resumed["finished"] is True and "runs" not in resumed
    assert len({prompt for prompt, most in asked if most == 6}) == 2, "only what was missing"
    more = ["--temperature", "0.8", "--seed", str(seed)]
    assert counted(resumed) == counted(run(folders, tmp_path / "whole.json", *more))


def test_a_finished_report_is_shown_again(folders, tmp_path, monkeypatch, capsys):
    before = run(folders, tmp_path / "report.json", "--limit", "1")
    printed = capsys.readouterr().out
    monkeypatch.setattr(measure, "answer", lambda *_: pytest.fail("measured again"))
    assert run(folders, tmp_path / "report.json", "--limit", "1", "--resume") == before
    assert capsys.readouterr().out == printed


def test_a_report_is_whole_though_nobody_reads_what_is_printed(folders, tmp_path, monkeypatch):
    def leave(report: Any) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(benchmark, "format_report", leave)
    with pytest.raises(BrokenPipeError):
        run(folders, tmp_path / "report.json", "--limit", "1")
    assert json.loads((tmp_path / "report.json").read_text())["finished"] is True


def test_a_table_is_printed_though_the_report_cannot_be_kept(
    folders, tmp_path, monkeypatch, capsys
):
    def refuse(file: Path, report: Any, runs: Any = None) -> None:
        if runs is None:
            raise DFlashError("the disk is full", "free some space")

    monkeypatch.setattr(benchmark, "save", refuse)
    with pytest.raises(DFlashError, match="the disk is full"):
        run(folders, tmp_path / "report.json", "--limit", "1")
    assert "| all | none |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (["--max-tokens", "7"], ["max_tokens", "6", "7"]),
        (["--methods", "dflash:4"], ["ddtree"]),
        (["--seed", "1"], ["seed", "1"]),
        (["--limit", "1"], ["limit", "1"]),
        (["--drafter-bits", "8"], ["drafter_bits", "8"]),
    ],
)
def test_other_settings_are_refused_with_what_is_other(
    interrupted, folders, monkeypatch, more, values
):
    before = interrupted.read_text()
    monkeypatch.setattr(measure, "answer", lambda *_: pytest.fail("measured"))
    with pytest.raises(DFlashError) as failure:
        benchmark.main(options(folders, interrupted, "--temperature", "0.8", "--resume", *more))
    assert all(value in failure.value.what for value in [*values, str(interrupted)])
    assert interrupted.read_text() == before


def test_other_prompts_of_the_same_name_are_refused(interrupted, folders, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({**row, "prompt": row["prompt"] + "!"}) for row in ROWS)
    )
    more = ["--temperature", "0.8", "--resume", "--prompts", str(tmp_path / "prompts.jsonl")]
    with pytest.raises(DFlashError, match="prompts_hash"):
        benchmark.main(options(folders, interrupted, *more))


def test_another_draft_model_is_refused_be_it_the_second(tmp_path):
    reports = [
        describe(Pair(ToyTarget(4), None, drafter_name="A", drafter_names=names), PairConfig())
        for names in (("A", "B"), ("A", "C"))
    ]
    with pytest.raises(DFlashError, match="drafters .*'B'.*, and now it is .*'C'"):
        finished_runs(*reports, [], tmp_path / "report.json")


def test_a_methods_own_settings_are_told_among_the_others():
    methods = {
        name: DecodeConfig(name) for name in ("d2sd", "resample", "eagle3", "specdiff", "dflash")
    }
    methods["asked"] = settle(config_with("eagle3", branches=5), Capabilities())
    told = settings([BenchmarkPrompt("1", "chat", [1])], methods, SamplingConfig())["methods"]
    branches = {name: config.get("branches") for name, config in told.items()}
    unasked = dict.fromkeys(("d2sd", "resample", "eagle3", "specdiff", "dflash"))
    assert branches == {**unasked, "asked": 5}


BAD_REPORTS = {
    "nothing": None,
    "no JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "an older report": json.dumps({"settings": {"sampling": {}}}),
    "no settings": json.dumps({"finished": False}),
    "settings of another kind": json.dumps({"finished": False, "settings": {"sampling": 1}}),
}


@pytest.mark.parametrize("case", BAD_REPORTS)
def test_what_is_no_report_is_refused_before_the_pair_is_loaded(
    folders, tmp_path, monkeypatch, case
):
    monkeypatch.setattr(benchmark.cli, "open_pair", lambda *_: pytest.fail("the pair was loaded"))
    file, contents = tmp_path / "report.json", BAD_REPORTS[case]
    if contents is not None:
        file.write_text(contents)
    with pytest.raises(DFlashError, match="report.json"):
        benchmark.main(options(folders, file, "--resume"))


def test_resume_without_a_report_is_refused(folders, monkeypatch):
    monkeypatch.setattr(benchmark.cli, "open_pair", lambda *_: pytest.fail("the pair was loaded"))
    arguments = options(folders, Path("unused"), "--resume")
    at = arguments.index("--json")
    with pytest.raises(DFlashError, match="--resume"):
        benchmark.main(arguments[:at] + arguments[at + 2 :])


def test_damaged_runs_are_refused(interrupted, folders):
    report = json.loads(interrupted.read_text())
    del report["runs"][1]["statistics"]
    interrupted.write_text(json.dumps(report))
    with pytest.raises(DFlashError, match="damaged"):
        benchmark.main(options(folders, interrupted, "--temperature", "0.8", "--resume"))


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


# Prompts from standard input


def test_prompts_come_from_standard_input(folders, tmp_path, monkeypatch):
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines)))
    report = run(folders, tmp_path / "report.json", "--prompts", "-", "--limit", "1")
    assert report["settings"]["prompts"] == 2
    assert report["settings"]["prompts_file"] == "standard input"


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "holds no prompts"), (b"{\n", "line 1"), (b"\xff", "0xff")],
)
def test_damaged_prompts_on_standard_input_are_refused(
    folders, tmp_path, monkeypatch, data, message
):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    with pytest.raises(DFlashError, match=message) as failure:
        benchmark.main(options(folders, tmp_path / "report.json", "--prompts", "-"))
    assert "standard input" in failure.value.what
