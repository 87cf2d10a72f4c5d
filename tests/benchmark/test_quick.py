"""What the chat measures: the short benchmark, and a race between plain decoding and drafts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.benchmark import quick
from dflash_mlx.benchmark.quick import Lane, result_of
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.client import (
    DecodeConfig,
    DFlashError,
    Pair,
    PairConfig,
    Question,
    RaceResult,
    RaceStep,
    SamplingConfig,
    race,
    save_bench,
)
from dflash_mlx.client import what_pays as sentence
from dflash_mlx.drafters.methods import serving
from dflash_mlx.engine.exact import Difference
from dflash_mlx.engine.pair import Capabilities
from dflash_mlx.models.load import load


@pytest.fixture(scope="module")
def pair(bench) -> Pair:
    return load(str(bench.root / "model"), str(bench.root / "drafter"))


@pytest.fixture(scope="module")
def steps(pair: Pair) -> list[quick.BenchStep]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "TOKENS", 4)
        return list(quick.bench(pair, PairConfig(), SamplingConfig(), ["dflash:4", "none"]))


def test_a_dozen_prompts_of_three_kinds_are_asked_with_every_method_that_the_pair_serves():
    rows = read_prompts(quick.PROMPTS)
    assert Counter(row["category"] for row in rows) == {"math": 4, "code": 4, "chat": 4}
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 12
    assert set(serving(Capabilities(("dflash",) * 2))) == {"ngram", "dflash", "ddtree", "d2sd"}
    assert set(serving(Capabilities(("dflash",), trees=False))) == {"ngram", "dflash"}
    assert serving(Capabilities()) == ("ngram",)


def test_every_pass_is_a_step_and_finished_prompts_have_figures(steps):
    assert max(step.answers for step in steps) == steps[0].of == 24 < len(steps) / 2
    counted = [(step.answers, step.prompts) for step in steps]
    assert list(dict.fromkeys(counted))[:5] == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1)]
    assert steps[counted.index((2, 0))].report == {}
    assert list(steps[counted.index((2, 1))].report["methods"]) == ["none", "dflash:4"]
    asked = [row["prompt"] for row in read_prompts(quick.PROMPTS)]
    assert [step.prompt for step in steps] == [[*asked, ""][step.prompts] for step in steps]
    report = steps[-1].report
    assert steps[-1].prompts == report["settings"]["prompts"] == 12
    assert list(report["categories"]) == ["math", "code", "chat"]
    assert report["settings"]["methods"]["none"]["max_tokens"] == 4


def test_methods_that_are_not_known_or_not_served_are_refused(pair):
    for name in ("magic", "dflash:99"):
        with pytest.raises(DFlashError, match=name.partition(":")[2] or name):
            next(quick.bench(pair, PairConfig(), SamplingConfig(), [name]))


def report_of(**speedups: Any) -> dict[str, Any]:
    """speedups: of methods, over all and by category."""
    every = {"none": (1.0, 1.0, 1.0), **speedups}

    def figures(i: int) -> dict[str, Any]:
        return {m: {"speedup": s[i], "tokens_per_second": 10 * s[i]} for m, s in every.items()}

    return {"methods": figures(0), "categories": {"code": figures(1), "chat": figures(2)}}


def test_the_sentence_names_the_fastest_method_and_where_it_is_fastest_if_any_is_faster():
    text = sentence(report_of(ddtree=(2.0, 2.5, 1.5), ngram=(1.2, 1.4, 1.0)), 2)
    said = ("DFlash tree", "2.00 times", "20.0", "10.0", "most for code (2.50)", "chat (1.50)")
    assert [part for part in said if part not in text] == []
    assert "\n" not in text and "; " not in text
    for best in (0.7, 1.04):
        text = sentence(report_of(ddtree=(best, 2.5, 0.5)), 2)
        assert "do not pay" in text and "10.0" in text


def test_it_is_saved_as_json_with_what_is_finished(steps, tmp_path):
    file = save_bench(steps[-1].report, tmp_path / "new", 12)
    assert json.loads(file.read_text())["finished"] is True
    file = save_bench(next(filter(None, (s.report for s in steps))), tmp_path / "broken off", 1)
    stored = json.loads(file.read_text())
    assert stored["finished"] is False and stored["finished_prompts"] == 1
    with pytest.raises(DFlashError, match=file.name):
        save_bench(steps[-1].report, file / "below", 12)


# A race

CONFIG = DecodeConfig(max_tokens=12, method="dflash")


def request(**settings):
    return Question(({"role": "user", "content": "hello"},), None, replace(CONFIG, **settings))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=0.9, seed=1)])
def test_a_race_decodes_both_ways_from_one_seed_and_compares_every_token(pair, sampling):
    *steps, result = race(pair, request(sampling=sampling))
    ends = {step.side: step for step in steps if step.finished}
    length = ends["plain"].tokens
    assert 0 < length == ends["drafted"].tokens
    assert all(isinstance(step, RaceStep) and step.seconds > 0 for step in steps)
    assert isinstance(result, RaceResult) and result.equal
    assert result.text.startswith(f"All {length} tokens are the same. ")
    plain, drafted = ("".join(s.text for s in steps if s.side == side) for side in ends)
    assert plain == drafted
    assert length == 12 or sampling.temperature


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"method": "none"}, "choose another method="),
        ({"sampling": SamplingConfig(0.9), "acceptance": "reject"}, "--acceptance"),
    ],
)
def test_a_race_in_which_nothing_could_be_compared_is_refused(pair, settings, step):
    with pytest.raises(DFlashError, match=step):
        next(race(pair, request(**settings)))


def lane(side, tokens, seconds):
    return Lane(side, iter(()), list(range(tokens)), seconds, True)


TIE, ERROR, END = (Difference(7, margin) for margin in (1e-4, 0.5, None))


@pytest.mark.parametrize(
    ("plain", "drafted", "difference", "ratio", "said"),
    [
        ((100, 5.0), (100, 2.0), None, 2.5, "All 100 tokens are the same. 2.50 times as fast as"),
        ((100, 2.0), (100, 4.0), None, 0.5, "All 100 tokens are the same. 0.50 times as fast as"),
        ((100, 5.1), (100, 5.0), None, 0.0, "the same. With drafts it is as fast as plain"),
        ((100, 4.8), (100, 5.0), None, 0.0, "the same. With drafts it is as fast as plain"),
        ((19, 5.0), (19, 2.0), None, 0.0, "All 19 tokens are the same. Fewer than 20 tokens"),
        ((1, 0.0), (1, 0.0), None, 0.0, "All 1 tokens are the same. Fewer than 20 tokens"),
        ((20, 5.0), (20, 2.0), None, 2.5, "All 20 tokens are the same. 2.50 times as fast as"),
        (
            (100, 5.0),
            (50, 1.0),
            TIE,
            2.5,
            "up to token 7, where two tokens are nearly tied (logits",
        ),
        ((100, 5.0), (50, 1.0), ERROR, 2.5, "up to token 7, with logits 0.50 apart, which is not"),
        ((100, 5.0), (50, 1.0), END, 2.5, "up to token 7, one answer ends there. 2.50 times"),
        ((100, 5.0), (7, 1.0), END, 0.0, "one answer ends there. Fewer than 20 tokens"),
    ],
)
def test_a_race_tells_a_ratio_only_where_it_means_something(
    plain, drafted, difference, ratio, said
):
    lanes = lane("plain", *plain), lane("drafted", *drafted)
    result = result_of(*lanes, difference)
    assert said in result.text
    assert result.ratio == pytest.approx(ratio)
    assert result.equal == (difference is None)
    assert ("times as fast" in result.text) == bool(ratio)
