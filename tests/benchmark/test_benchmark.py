"""The benchmark on a tiny pair: its report, its pictures, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from dflash_mlx.benchmark import __main__ as benchmark
from dflash_mlx.benchmark import measure
from dflash_mlx.benchmark.plots import draw_report
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters import budget
from dflash_mlx.verifier.pass_times import PassTimes
from support.models import write_drafter, write_model

METHODS = ["none", "dflash:4", "dflash:8"]
FIGURES = """
    tokens_per_second speedup intervals ratio_of_medians mean_accepted rows_per_round
    acceptance_rate accepted_by_position committed modes guard parity
    first_differences round_ms
"""
TEXTS = {"code": ["def f():", "x = 1", "import os"], "chat": ["hello", "how are you?"]}
ROWS = [
    {"id": f"{category}-{i}", "category": category, "messages": [{"role": "user", "content": text}]}
    for category, texts in TEXTS.items()
    for i, text in enumerate(texts)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("benchmark")
    write_model(root / "model")
    write_drafter(root / "drafter")
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return root


def options(folders: Path, *more: str) -> list[str]:
    return [
        *("--model", str(folders / "model")),
        *("--drafter", str(folders / "drafter")),
        *("--prompts", str(folders / "prompts.jsonl")),
        *("--max-tokens", "12"),
        *more,
    ]


def run(folders: Path, *more: str) -> dict[str, Any]:
    file = folders / "report.json"
    benchmark.main(options(folders, "--json", str(file), *more))
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def measured(folders: Path) -> dict[str, Any]:
    return run(folders, "--methods", ",".join(METHODS))


# The report of a real run


def test_the_report_says_what_was_measured_on_what(measured, folders):
    said = {"machine", "versions", "pair", "settings", "methods", "categories", "finished"}
    assert measured.keys() == said and measured["finished"] is True
    assert measured["machine"].keys() >= {"processor", "system", "device", "cores", "memory_bytes"}
    assert measured["versions"].keys() >= {"python", "mlx", "mlx-lm"}
    named = {"target": str(folders / "model"), "drafter": str(folders / "drafter")}
    assert measured["pair"].items() >= named.items()
    assert measured["pair"]["drafters"] == [named["drafter"]]
    settings = measured["settings"]
    told = {"prompts": len(ROWS), "prompts_file": "prompts.jsonl", "limit": None}
    assert settings.items() >= told.items()
    assert list(settings["methods"]) == METHODS
    for name, config in settings["methods"].items():
        assert name.startswith(config["method"])
        assert (config["max_tokens"], config["sampling"]["temperature"]) == (12, 0)


def test_every_method_has_every_figure_and_gives_the_plain_answers(measured):
    groups = {"all": measured["methods"], **measured["categories"]}
    assert list(groups) == ["all", *TEXTS]
    assert all(list(group) == METHODS for group in groups.values())
    for name, figures in (each for group in groups.values() for each in group.items()):
        assert list(figures) == FIGURES.split()
        assert figures["tokens_per_second"] > 0 and figures["speedup"] > 0
        terms = figures["round_ms"]
        assert list(terms) == ["draft", "verify", "commit", "overhead"]
        assert min(terms.values()) >= 0 and terms["verify"] > 0
        assert name == "none" or terms["draft"] > 0.01
        assert (figures["parity"], figures["first_differences"]) == (1.0, [])
    positions = [len(f["accepted_by_position"]) for f in measured["methods"].values()]
    assert positions == [0, 3, 7]
    plain = measured["methods"]["none"]
    assert (plain["speedup"], plain["mean_accepted"], plain["acceptance_rate"]) == (1.0, 1.0, 0.0)


def test_a_limit_counts_per_category_and_none_is_always_run(folders, capsys):
    report = run(folders, "--methods", "dflash:4", "--limit", "1", "--temperature", "1")
    assert report["settings"]["prompts"] == 2
    assert isinstance(report["settings"]["methods"]["none"]["sampling"]["seed"], int)
    assert report["methods"]["dflash:4"]["parity"] == 1.0
    assert list(report["methods"]) == ["none", "dflash:4"]
    assert capsys.readouterr().out.startswith("| category | method |")


def test_the_order_of_the_methods_turns_from_prompt_to_prompt(folders, monkeypatch):
    order = []

    def answer(pair: Any, prompt: list[int], config: DecodeConfig) -> Any:
        order.append((config.method, config.max_tokens))
        return real(pair, prompt, config)

    real = measure.answer
    monkeypatch.setattr(measure, "answer", answer)
    run(folders, "--methods", "none,dflash", "--max-tokens", "3")
    turning = ["none", "dflash", "dflash", "none"] * 3
    assert order == [("none", 8), ("dflash", 8), *((method, 3) for method in turning[:10])]


TREES = ["d2sd:growth=paper", "d2sd:branches=2", "ddtree:budget=8", "resample:branches=2"]
SWEPT = {value: f"d2sd:branches=2:budget={value}" for value in ("auto", "6")}


@pytest.fixture(scope="module")
def trees(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a sampled sweep over the budget, its pictures, and what was printed."""
    plots = tmp_path_factory.mktemp("plots") / "new"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        times = PassTimes((1, 96), (1.0, 3.0))
        patch.setattr(budget, "stored_times", lambda target: times)
        more = ["--methods", ",".join(["dflash", *TREES]), "--sweep", "budget=auto,6"]
        more += ["--temperature", "0.7", "--seed", "3", "--limit", "1", "--plots", str(plots)]
        return {**run(folders, *more), "plots": plots, "printed": out.getvalue()}


def test_random_answers_of_every_method_are_the_plain_ones_with_that_seed(trees):
    report = trees
    assert list(report["methods"]) == ["none", "dflash", TREES[0], *SWEPT.values(), *TREES[2:]]
    tokens = set()
    for figures in report["methods"].values():
        assert figures["parity"] == 1.0 and figures["mean_accepted"] >= 1
        tokens.add(sum(int(n) * rounds for n, rounds in figures["committed"].items()))
    assert len(tokens) == 1 and report["methods"]["none"]["committed"] == {"1": tokens.pop()}
    assert report["settings"]["methods"][SWEPT["6"]]["budget"] == 6
    assert report["sweep"] == {"setting": "budget", "lines": {"d2sd:branches=2": SWEPT}}
    assert "| all | d2sd:branches=2 | 6 |" in report["printed"]


def test_the_picture_has_what_there_are_figures_for(trees, measured, tmp_path):
    (picture,) = trees["plots"].iterdir()
    draw_report(measured, tmp_path / "no sweep.png")
    swept, plain = (image.imread(file) for file in (picture, tmp_path / "no sweep.png"))
    for pixels in (swept, plain):
        assert min(pixels.shape[:2]) > 250 and pixels.std() > 0.05
    assert swept.shape[0] > plain.shape[0]


def test_auto_is_swept_as_what_it_is_with_the_pair_and_contexts_side_by_side(folders, capsys):
    more = ["--methods", "auto", "--sweep", "budget=4,8", "--limit", "1", "--max-tokens", "2"]
    report = run(folders, *more, "--context", "60,200")
    runs = {value: f"ddtree:budget={value}" for value in ("4", "8")}
    assert list(report["methods"]) == ["none", *runs.values()]
    assert report["sweep"]["lines"] == {"ddtree": runs}
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
        (["--methods", "dflash", "--sweep", "block=4,9"], "block_size is 9"),
    ],
)
def test_what_the_pair_cannot_do_is_refused_before_anything_is_measured(
    folders, monkeypatch, more, value
):
    monkeypatch.setattr(measure, "answer", lambda *_: pytest.fail("measured"))
    with pytest.raises(DFlashError, match=value):
        benchmark.main(options(folders, *more))


GOOD = json.dumps(ROWS[0]) + "\n"
BAD_PROMPTS = {
    "empty": ("", "holds no prompts"),
    "no JSON": ("hello\n", "line 1 of .* is no JSON"),
    "one damaged line": (GOOD + "{\n", "line 2 of .* is no JSON"),
    "a list of nothing": ("[]\n", "holds no prompts"),
    "no category": ('{"category": null, "prompt": "a"}', "line 1 of .* has no category"),
    "no messages": ('{"category": "chat"}', "line 1 of .* has the fields category"),
    "no content": (
        GOOD + '{"category": "a", "messages": [{"role": "user"}]}',
        "message 1 in line 2",
    ),
    "a damaged row after a blank line": (GOOD + "\n[]\n", "line 3 of"),
}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.cli, "open_pair", lambda *_: pytest.fail("the pair was loaded"))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_damaged_prompts_file_is_refused(folders, tmp_path, case):
    contents, message = BAD_PROMPTS[case]
    (tmp_path / "prompts.jsonl").write_text(contents)
    with pytest.raises(DFlashError, match=message) as failure:
        benchmark.main(options(folders, "--prompts", str(tmp_path / "prompts.jsonl")))
    assert "prompts.jsonl" in failure.value.what


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--json", "nowhere/report.json"], "nowhere/"),
        (["--plots", "nowhere/plots"], "nowhere/"),
        (["--json", "."], "folder"),
        (["--plots", "prompts.jsonl"], "prompts.jsonl is a file"),
        (["--json", "prompts.jsonl", "--prompts", "prompts.jsonl"], "prompts.jsonl"),
        (["--plots", "/dev/null/plots"], "/dev/null/plots is a file or in no folder"),
        (["--methods", "dflash", "--budget", "8"], "budget is 8"),
        (["--limit", "0"], "limit is 0"),
        (["--methods", "none,dflash:1"], "block_size is 1"),
        (["--context", "long"], "the context is 'long'"),
        (["--sweep", "budget=1", "--methods", "ddtree"], "budget is 1"),
    ],
)
def test_bad_options_are_refused_before_the_pair_is_loaded(
    folders, more, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(GOOD)
    with pytest.raises(DFlashError, match=message) as failure:
        benchmark.main(options(folders, *more))
    assert failure.value.next_step
    assert (tmp_path / "prompts.jsonl").read_text() == GOOD


@pytest.mark.usefixtures("no_work")
def test_a_drawing_without_matplotlib_is_refused(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlashError, match="matplotlib"):
        benchmark.main(options(folders, "--plots", str(tmp_path / "plots")))
    assert not (tmp_path / "plots").exists()
