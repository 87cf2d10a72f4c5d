"""The benchmark: its report on a tiny pair, and the arithmetic behind the report."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx import benchmark, report
from dflash_mlx.config import DecodeConfig
from dflash_mlx.errors import DFlashError
from dflash_mlx.report import Difference, Run, first_difference, format_table, summarise
from dflash_mlx.statistics import Statistics
from dflash_mlx.target import Target
from families import make_model
from test_load import write_drafter, write_model

TERMS = {"draft", "verify", "commit", "overhead"}
METHODS = ["none", "dflash:4", "dflash:8"]
FIGURES = {
    "tokens_per_second",
    "speedup",
    "mean_accepted",
    "acceptance_rate",
    "parity",
    "first_differences",
    "round_ms",
}
TEXTS = {"code": ["def f():", "x = 1", "import os"], "chat": ["hello", "how are you?"]}
ROWS = [
    {"id": f"{category}-{i}", "category": category, "messages": [{"role": "user", "content": text}]}
    for category, texts in TEXTS.items()
    for i, text in enumerate(texts)
]


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("benchmark")
    write_model(root / "model")
    write_drafter(root / "drafter")
    write_rows(root / "prompts.jsonl", ROWS)
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
    assert measured.keys() >= {"machine", "versions", "pair", "settings", "methods", "categories"}
    assert measured["machine"]["cores"] >= 1 and measured["machine"]["memory_bytes"] > 1e8
    assert all(measured["machine"][key] for key in ("processor", "system", "device"))
    assert measured["versions"].keys() >= {"python", "mlx", "mlx-lm"}
    assert measured["pair"] == {
        "target": str(folders / "model"),
        "drafter": str(folders / "drafter"),
    }
    assert measured["settings"]["prompts"] == len(ROWS)
    assert measured["settings"]["prompts_file"].endswith(".jsonl")
    assert list(measured["settings"]["methods"]) == METHODS
    for name, config in measured["settings"]["methods"].items():
        assert name.startswith(config["method"])
        assert config["max_tokens"] == 12
        assert config["sampling"]["temperature"] == 0


def test_every_method_has_every_figure_overall_and_per_category(measured):
    assert list(measured["methods"]) == METHODS
    assert list(measured["categories"]) == list(TEXTS)
    groups = [measured["methods"], *measured["categories"].values()]
    assert all(list(group) == METHODS for group in groups)
    for figures in (figures for group in groups for figures in group.values()):
        assert figures.keys() >= FIGURES
        assert figures["round_ms"].keys() == TERMS
        assert figures["tokens_per_second"] > 0 and figures["speedup"] > 0
        assert figures["mean_accepted"] >= 1


def test_every_method_gives_the_plain_answers(measured):
    for name in METHODS:
        assert measured["methods"][name]["parity"] == 1.0
        assert measured["methods"][name]["first_differences"] == []


def test_plain_decoding_is_its_own_measure(measured):
    plain = measured["methods"]["none"]
    assert (plain["speedup"], plain["mean_accepted"], plain["acceptance_rate"]) == (1.0, 1.0, 0.0)
    assert plain["accepted_by_position"] == []


def test_block_sizes_of_the_methods_are_used(measured):
    positions = {n: len(f["accepted_by_position"]) for n, f in measured["methods"].items()}
    assert positions == {"none": 0, "dflash:4": 3, "dflash:8": 7}


def test_the_terms_of_a_round_are_shares_of_its_time(measured):
    for name in METHODS:
        terms = measured["methods"][name]["round_ms"]
        assert terms["verify"] > 0
        assert all(milliseconds >= 0 for milliseconds in terms.values())
        assert (terms["draft"] > 0.01) or name == "none"


def test_plain_decoding_spends_its_rounds_on_the_target(measured):
    terms = measured["methods"]["none"]["round_ms"]
    assert terms["verify"] > terms["commit"]


def test_random_answers_are_the_plain_ones_too(folders):
    figures = run(folders, "--methods", "dflash:4", "--temperature", "1")["methods"]
    assert figures["dflash:4"]["parity"] == 1.0


def test_the_settings_of_random_answers_can_be_given_again(folders):
    settings = run(folders, "--methods", "none", "--limit", "1", "--temperature", "1")["settings"]
    assert isinstance(settings["methods"]["none"]["sampling"]["seed"], int)


def test_a_limit_counts_per_category_and_none_is_always_run(folders, capsys):
    figures = run(folders, "--methods", "dflash:4", "--limit", "1")
    assert figures["settings"]["prompts"] == 2
    assert list(figures["methods"]) == ["none", "dflash:4"]
    out = capsys.readouterr().out
    assert out.startswith("| category | method |")
    rows = [line.split("|")[1:3] for line in out.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [category, method]
        for category in ("all", "code", "chat")
        for method in ("none", "dflash:4")
    ]


def test_the_order_of_the_methods_turns_from_prompt_to_prompt(folders, monkeypatch):
    order = []

    def answer(pair: Any, prompt: list[int], config: DecodeConfig) -> Any:
        order.append((len(prompt), config.method, config.max_tokens))
        return real(pair, prompt, config)

    real = benchmark.answer
    monkeypatch.setattr(benchmark, "answer", answer)
    run(folders, "--methods", "none,dflash", "--max-tokens", "3")
    warm, measured = order[:2], order[2:]
    assert [(method, tokens) for _, method, tokens in warm] == [("none", 8), ("dflash", 8)]
    assert [m for _, m, _ in measured] == (["none", "dflash", "dflash", "none"] * 3)[:10]
    assert all(tokens == 3 for *_, tokens in measured)


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@needs_matplotlib
def test_the_report_is_drawn(measured, tmp_path):
    from matplotlib import image

    report.plot(measured, tmp_path / "report.png")
    pixels = image.imread(tmp_path / "report.png")
    assert min(pixels.shape[:2]) > 300 and pixels.std() > 0.05


@needs_matplotlib
def test_the_drawing_is_written_where_it_was_asked_for(folders, tmp_path):
    file = tmp_path / "report.png"
    benchmark.main(options(folders, "--plot", str(file), "--methods", "none", "--limit", "1"))
    assert file.read_bytes().startswith(b"\x89PNG")


# What is refused before the work starts

ROW = ROWS[0]
BAD_PROMPTS: dict[str, tuple[str, str]] = {
    "empty": ("", "holds no prompts"),
    "blank lines": ("\n \n", "holds no prompts"),
    "no JSON": ("hello\n", "line 1 of .* is no JSON"),
    "one damaged line": (json.dumps(ROW) + "\n{\n", "line 2 of .* is no JSON"),
    "a list": ("[]\n", "line 1 of .* has no category"),
    "no category": (json.dumps({**ROW, "category": None}) + "\n", "line 1 of .* has no category"),
    "no messages": (json.dumps({"category": "chat"}) + "\n", "line 1 of .* holds no messages"),
    "empty messages": (json.dumps({**ROW, "messages": []}) + "\n", "holds no messages"),
    "a message without content": (
        json.dumps(ROW) + "\n" + json.dumps({**ROW, "messages": [{"role": "user"}]}) + "\n",
        "message 0 in line 2 of",
    ),
    "a damaged row after a blank line": (json.dumps(ROW) + "\n\n[]\n", "line 3 of"),
}


def test_a_row_may_hold_any_character_that_json_allows(tmp_path):
    text = "one\u2028two\x85three"
    row = {**ROW, "messages": [{"role": "user", "content": text}]}
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert benchmark.read_prompts(file, None) == [row]


def test_a_report_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "report.json"
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DFlashError, match="report.json cannot be written .*No space"):
        benchmark.write_whole(file, "{}")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_pair(*_: Any) -> Any:
        raise AssertionError("the pair was loaded")

    monkeypatch.setattr(benchmark, "load_pair", load_pair)


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
        (["--json", "nowhere/report.json"], "there is no folder nowhere"),
        (["--plot", "nowhere/report.png"], "there is no folder nowhere"),
        (["--json", "."], "folder"),
        (["--plot", "."], "folder"),
        (["--json", "prompts.jsonl", "--prompts", "prompts.jsonl"], "the prompts themselves"),
        (["--limit", "0"], "limit is 0"),
        (["--limit", "-1"], "limit is -1"),
        (["--methods", "magic"], "method is 'magic'"),
        (["--methods", ""], "method is ''"),
        (["--methods", "none,dflash:1"], "block_size is 1"),
        (["--methods", "dflash:two"], "the block size in 'dflash:two' is 'two'"),
        (["--methods", "dflash:²"], "the block size in 'dflash:²' is '²'"),
        (["--temperature", "-1"], "temperature is -1.0"),
    ],
)
def test_bad_options_are_refused_before_the_pair_is_loaded(
    folders, more, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROW))
    with pytest.raises(DFlashError, match=message) as failure:
        benchmark.main(options(folders, *more))
    assert failure.value.next_step
    assert (tmp_path / "prompts.jsonl").read_text() == json.dumps(ROW)


@pytest.mark.usefixtures("no_work")
def test_a_drawing_without_matplotlib_is_refused_before_the_pair_is_loaded(
    folders, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlashError, match="--plot needs matplotlib; install it"):
        benchmark.main(options(folders, "--plot", str(tmp_path / "report.png")))


def test_a_block_larger_than_the_drafters_is_refused_before_anything_is_measured(
    folders, monkeypatch
):
    monkeypatch.setattr(benchmark, "compare", lambda *_: pytest.fail("measured"))
    with pytest.raises(DFlashError, match="block_size is 9"):
        benchmark.main(options(folders, "--methods", "dflash:9"))


# The arithmetic


def statistics(tokens: int, seconds: float, rounds: int = 1, **more: Any) -> Statistics:
    return Statistics(
        "made up", generated_tokens=tokens, decode_seconds=seconds, rounds=rounds, **more
    )


def made_up(
    rate: float,
    plain_rate: float,
    category: str = "chat",
    method: str = "dflash",
    difference: Difference | None = None,
    rounds: int = 10,
    seconds: dict[str, float] | None = None,
    **more: Any,
) -> Run:
    """A run of 100 tokens at `rate` tokens per second, beside the plain one."""
    return Run(
        prompt="prompt",
        category=category,
        method=method,
        statistics=statistics(100, 100 / rate, rounds, **more),
        seconds=seconds or {},
        plain=statistics(100, 100 / plain_rate),
        difference=difference,
    )


def test_the_speedup_is_the_median_of_ratios_and_not_the_ratio_of_medians():
    figures = summarise([made_up(10, 5), made_up(20, 40), made_up(100, 25)])["methods"]["dflash"]
    assert figures["speedup"] == pytest.approx(2.0)  # of 2, 0.5 and 4; the medians give 20 / 25
    assert figures["tokens_per_second"] == pytest.approx(20)


def test_tokens_per_round_and_acceptance_are_over_all_rounds_together():
    runs = [
        made_up(10, 5, rounds=10, drafted=Counter({1: 8, 2: 2}), accepted=Counter({1: 4, 2: 1})),
        made_up(10, 5, rounds=40, drafted=Counter({1: 30}), accepted=Counter({1: 5})),
    ]
    figures = summarise(runs)["methods"]["dflash"]
    assert figures["mean_accepted"] == 200 / 50
    assert figures["acceptance_rate"] == 10 / 40
    assert figures["accepted_by_position"] == [9 / 38, 1 / 2]


def test_overhead_is_what_the_other_terms_leave_of_a_round():
    run = made_up(50, 25, rounds=10, seconds={"draft": 0.5, "verify": 1.0, "commit": 0.1})
    terms = {term: run.round_ms(term) for term in TERMS}
    assert terms == pytest.approx({"draft": 50, "verify": 100, "commit": 10, "overhead": 40})
    figures = summarise([run, run, made_up(50, 25)])["methods"]["dflash"]
    assert figures["round_ms"]["draft"] == pytest.approx(50)


def test_parity_counts_the_answers_without_a_difference():
    runs = [made_up(1, 1), made_up(1, 1, difference=Difference(3, 0.25)), made_up(1, 1)]
    figures = summarise([*runs, made_up(1, 1)])["methods"]["dflash"]
    assert figures["parity"] == 0.75
    assert figures["first_differences"] == [{"id": "prompt", "position": 3, "margin": 0.25}]


def test_categories_and_methods_are_kept_apart_and_in_order():
    runs = [
        made_up(10, 10, "code", "none"),
        made_up(20, 10, "code", "dflash"),
        made_up(40, 40, "chat", "none"),
        made_up(160, 40, "chat", "dflash"),
    ]
    summary = summarise(runs)
    assert list(summary["categories"]) == ["code", "chat"]
    speedups = {
        category: {name: figures["speedup"] for name, figures in methods.items()}
        for category, methods in summary["categories"].items()
    }
    assert speedups == {
        "code": pytest.approx({"none": 1.0, "dflash": 2.0}),
        "chat": pytest.approx({"none": 1.0, "dflash": 4.0}),
    }
    assert summary["methods"]["dflash"]["speedup"] == pytest.approx(3.0)


def test_the_table_has_a_row_for_every_category_and_method():
    summary = summarise([made_up(20, 10, "code"), made_up(30, 10, "chat")])
    header, rule, *rows = format_table(summary).splitlines()
    assert len(rows) == 3
    assert {line.count("|") for line in (header, rule, *rows)} == {12}
    assert rows[1].startswith("| code | dflash | 20.0 | 2.00 | 10.00 | 0% | 100.0% |")


# First differences

PROMPT = [5, 9, 30, 41, 7]
PLAIN = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model("llama"), 512, "llama")


def test_equal_answers_have_no_difference(target):
    assert first_difference(target, PROMPT, PLAIN, list(PLAIN)) is None


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_difference_has_its_position_and_the_margin_of_the_logits_there(target, at):
    other = [*PLAIN]
    other[at:] = [60 + i for i in range(4 - at)]
    found = first_difference(target, PROMPT, PLAIN, other)
    logits = np.array(make_model("llama")(mx.array([PROMPT + PLAIN[:at]]))[0, -1])
    margin = abs(logits[PLAIN[at]] - logits[other[at]])
    assert margin > 0.05
    assert found.position == at
    assert found.margin == pytest.approx(margin, abs=1e-4)


@pytest.mark.parametrize("other", [PLAIN[:2], [], [*PLAIN, 14]], ids=["shorter", "none", "longer"])
def test_an_answer_of_another_length_differs_where_the_shorter_one_ends(target, other):
    expected = Difference(min(4, len(other)), None)
    assert first_difference(target, PROMPT, PLAIN, other) == expected
    assert first_difference(target, PROMPT, other, PLAIN) == expected
    assert not expected.is_near_tie


def test_looking_for_a_difference_leaves_the_answers_to_come_alone(target):
    first = first_difference(target, PROMPT, PLAIN, [10, 60])
    assert first_difference(target, PROMPT, PLAIN, [10, 60]) == first
