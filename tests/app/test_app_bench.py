"""The benchmark in the chat: its table and bars, its screen, and what leaving it keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_chat import bench as benches
from dflash_chat.bench import BenchRequest, BenchResult, run_bench, table
from dflash_chat.bench_screen import BenchScreen
from dflash_chat.commands import parse
from dflash_chat.figures import wide_bar
from dflash_mlx.client import BenchStep, DFlashError, PairConfig, SamplingConfig
from dflash_mlx.engine.pair import Capabilities
from support.app_scripts import ScriptedBackend, gated, in_chat


def figures(speedup: float) -> dict[str, Any]:
    told = {"tokens_per_second": 10 * speedup, "mean_accepted": 1 + speedup, "parity": 1.0}
    return told | {"speedup": speedup}


REPORT: dict[str, Any] = {
    "methods": {"none": figures(1.0), "ngram": figures(1.25), "ddtree:budget=8": figures(2.0)},
    "categories": {
        "code": {"ddtree:budget=8": figures(2.5)},
        "chat": {"ddtree:budget=8": figures(1.25)},
    },
}
STEPS = [BenchStep(1, 6), BenchStep(2, 6), BenchStep(3, 6, 1, REPORT)]
RESULT = BenchResult("DFlash tree pays on this machine", "Saved as bench.json.")


@pytest.mark.parametrize(
    ("share", "width", "shown"),
    [
        (1, 4, "████"), (0.5, 4, "██"), (0.53125, 4, "██▏"), (0, 4, ""), (0.5, 0, ""),
        (2, 2, "██"), (-1, 2, ""), (0.5, -3, ""),
    ],
)  # fmt: skip
def test_a_bar_is_as_long_as_its_share_to_an_eighth_of_a_column(share, width, shown):
    assert wide_bar(share, width) == shown


@pytest.mark.parametrize("width", [60, 76, 110])
def test_the_table_has_a_line_and_a_bar_for_every_method_within_its_width(width):
    lines = table(REPORT, Capabilities(("dflash", "dflash")), width)
    head, plain, lookup, tree, _, title, code, chat = lines
    assert max(map(len, lines)) <= max(width, 66)
    assert "tok/s" in head and "x plain" in head
    assert plain.startswith("plain decoding") and "10.0" in plain and "1.00" in plain
    assert tree.startswith("DFlash tree, budget=8") and "2.00" in tree
    assert title.startswith("DFlash tree, budget=8")
    if width > 70:
        assert code.count("█") == width - code.index("█"), "the fastest has the longest bar"
        assert tree.count("█") == code.count("█") * 4 // 5 > lookup.count("█") > plain.count("█")
        assert chat.count("█") == lookup.count("█"), "as fast, so as long"


def test_where_plain_decoding_is_the_fastest_there_is_nothing_by_kind():
    report = {"methods": {"none": figures(1.0), "ngram": figures(0.5)}, "categories": {}}
    assert len(table(report, Capabilities(), 80)) == 3


@in_chat(lambda: ScriptedBackend(bench_steps=[*STEPS, RESULT]))
async def test_bench_shows_its_table_and_what_pays_or_what_cannot_be_run(chat, app, backend):
    app.pair_config = PairConfig("some/model")
    await chat.say("/bench ngram, ddtree:budget=8")
    await chat.shows("pays on this machine")
    assert "DFlash tree, budget=8" in chat.text and "█" in chat.text
    assert "Saved as bench.json." in chat.text
    asked = backend.requests[0]
    assert asked.methods == ("ngram", "ddtree:budget=8")
    assert asked.pair == PairConfig("some/model")
    assert asked.folder.is_relative_to(app.store.folder)
    await chat.press("escape")
    await chat.answered()
    backend.bench_steps = [DFlashError("method is 'x'", "choose another")]
    await chat.say("/bench x")
    assert isinstance(app.screen, BenchScreen)
    await chat.shows("method is 'x'; choose another")
    await chat.press("q")
    assert chat.notices == []


@in_chat(lambda: gated(2, bench_steps=[*STEPS, RESULT]))
async def test_leaving_bench_ends_it_and_there_is_one_comparison_at_a_time(chat, app, backend):
    await chat.say("/bench")
    await chat.shows("answer 2 of 6")
    job = app.screen.job
    await chat.press("ctrl+c")
    assert job.cancelled.is_set() and app.screen is app.base
    backend.gate.release()
    backend.gate = None
    await chat.answered()
    assert app.listener.comparison is None
    backend.hold(1)
    await chat.say("What meets?")
    await chat.say("/bench")
    assert "an answer is being written" in chat.notices[-1], "which it does not wait for"
    assert app.screen is app.base
    await chat.goes_on()
    backend.hold(2)
    await chat.say("/bench")
    with pytest.raises(DFlashError, match="a comparison is being run"):
        await app.commands.run(parse("/race why"))
    assert isinstance(app.listener.comparison, BenchScreen)
    backend.gate.release(100)


def pair_and_request(folder: Path) -> tuple[Any, BenchRequest]:
    pair = SimpleNamespace(capabilities=Capabilities(("dflash",) * 2))
    return pair, BenchRequest(PairConfig(), SamplingConfig(), (), folder)


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Reports that were saved, with how many prompts were finished."""
    kept: list[tuple[Any, int]] = []

    def save(report: Any, folder: Path, prompts: int) -> Path:
        kept.append((report, prompts))
        return folder / "bench.json"

    monkeypatch.setattr(benches, "bench", lambda *arguments: iter(STEPS))
    monkeypatch.setattr(benches, "save_bench", save)
    return kept


def test_a_finished_benchmark_is_saved_and_says_where_or_why_not(saved, tmp_path, monkeypatch):
    *steps, result = run_bench(*pair_and_request(tmp_path))
    assert steps == STEPS and saved == [(REPORT, 1)]
    assert str(tmp_path / "bench.json") in result.saved
    assert "pays" in result.text

    def refuse(*arguments: Any) -> Any:
        raise DFlashError("the disk is full", "free some space")

    monkeypatch.setattr(benches, "save_bench", refuse)
    *_, result = run_bench(*pair_and_request(tmp_path))
    assert "the disk is full" in result.saved and "pays" in result.text


def test_a_benchmark_that_is_left_keeps_the_prompts_that_are_finished(saved, tmp_path):
    for taken, kept in ((2, 0), (3, 1)):
        events = run_bench(*pair_and_request(tmp_path))
        assert [next(events) for _ in range(taken)] == STEPS[:taken]
        events.close()
        assert len(saved) == kept
