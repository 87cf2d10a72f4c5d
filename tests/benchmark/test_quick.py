"""What is measured for somebody: which draft models are fastest, and a race with plain decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.benchmark import quick
from dflash_mlx.benchmark.quick import Lane, result_of
from dflash_mlx.benchmark.quick import what_pays as sentence
from dflash_mlx.cli.prompts import read_prompts
from dflash_mlx.client import (
    DecodeConfig,
    DFlashError,
    Pair,
    Question,
    RaceResult,
    RaceStep,
    SamplingConfig,
    race,
)
from dflash_mlx.drafters.methods import serving
from dflash_mlx.engine.exact import Difference
from dflash_mlx.engine.pair import Capabilities
from dflash_mlx.models.load import load


@pytest.fixture(scope="module")
def pair(bench) -> Pair:
    return load(str(bench.root / "model"), str(bench.root / "drafter"))


def test_a_dozen_prompts_of_three_kinds_are_asked():
    rows = read_prompts(quick.PROMPTS)
    assert Counter(row["category"] for row in rows) == {"math": 4, "code": 4, "chat": 4}
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 12


def test_what_a_pair_serves():
    assert set(serving(Capabilities(("dflash",) * 2))) == {"ngram", "dflash", "ddtree", "d2sd"}
    assert set(serving(Capabilities(("dflash",), trees=False))) == {"ngram", "dflash"}
    assert serving(Capabilities()) == ("ngram",)


def test_every_pass_is_a_step_and_at_the_end_every_method_has_figures(pair, monkeypatch):
    monkeypatch.setattr(quick, "TOKENS", 4)
    steps, reports = [], []

    def running():
        reports.append((yield from quick.bench(pair, ["dflash:4"])))

    steps += running()
    assert len(steps) > 2 * 24 and {*steps} == {None}
    (report,) = reports
    assert list(report["methods"]) == ["none", "dflash:4"]
    assert list(report["categories"]) == ["math", "code", "chat"]


def test_methods_that_are_not_known_or_not_served_are_refused(pair):
    for name in ("magic", "dflash:99"):
        with pytest.raises(DFlashError, match=name.partition(":")[2] or name):
            next(quick.bench(pair, [name]))


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
