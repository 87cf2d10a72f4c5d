"""The table of drafting methods, from made-up reports."""

from __future__ import annotations

from typing import Any

import compare_methods
import pytest

from dflash_mlx.core.errors import DFlashError


def figures(accepted: float, speedup: list[float], draft: float = 0.0) -> dict[str, Any]:
    """Of one method; speedup: the figure and its interval, [] where no answer was timed."""
    return {
        "mean_accepted": accepted,
        "speedup": speedup[0] if speedup else 0.0,
        "intervals": {"mean_accepted": [accepted - 0.5, accepted + 0.5], "speedup": speedup[1:]},
        "round_ms": {"draft": draft, "verify": 2 * draft},
    }


def test_acceptance_is_of_all_answers_and_times_are_of_the_timed_ones():
    speed = {"all": {name: figures(9.0, [1.5, 1.25, 2.0], 3.0) for name in ("eagle3:8", "d2sd")}}
    walks = {"eagle3:8": {"all": figures(2.0, [7.0, 6.0, 8.0], 9.0)}}
    assert compare_methods.table(speed, walks).splitlines() == [
        "",
        "**all**",
        "",
        "| method | tokens/round | draft ms | verify ms | speed-up |",
        "| --- | --- | --- | --- | --- |",
        "| EAGLE-3, chain | 2.00 [1.50, 2.50] | 3.0 | 6.0 | 1.50 [1.25, 2.00] |",
        "| D2SD, as many as pay | 9.00 [8.50, 9.50] | 3.0 | 6.0 | 1.50 [1.25, 2.00] |",
    ]


def test_every_category_has_its_own_rows_though_no_answer_of_one_had_a_speed():
    speed = {"code": {"x": figures(1.0, [2.0, 1.0, 3.0])}, "chat": {"x": figures(1.0, [])}}
    walks = {"x": {name: figures(1.0, []) for name in ("chat", "code")}}
    lines = compare_methods.table(speed, walks).splitlines()
    chat, code = (lines[lines.index(f"**{name}**") + 4] for name in ("chat", "code"))
    assert chat == "| x | 1.00 [0.50, 1.50] | 0.0 | 0.0 | - |"
    assert code.endswith("| 2.00 [1.00, 3.00] |")


def test_methods_whose_trees_times_decide_are_not_walked():
    methods = list(compare_methods.METHODS)
    left = set(methods) - {*compare_methods.fixed(methods)}
    assert left == {"none", "ngram", "ddtree", "d2sd"}


def test_the_walked_answers_are_those_of_the_model_that_is_timed(tmp_path, monkeypatch):
    """Options that a collection of answers has no use for are left to the benchmark."""
    asked: dict[str, list[str]] = {}

    def keep(name):
        def main(argv):
            asked[name] = argv
            (tmp_path / "walks-0.json").write_text("{}")

        return main

    monkeypatch.setattr(compare_methods, "collect", keep("collect"))
    monkeypatch.setattr(compare_methods.simulate_trees, "main", keep("walk"))
    options = ["--kv-bits", "8", "--model", "m", "--template", "a=1", "--template", "b=2"]
    given = compare_methods.parser().parse_args(
        ["--prompts", "p.jsonl", "--out", str(tmp_path), "--", *options]
    )
    compare_methods.walk(given, ["dflash:8"], "0")
    assert asked["walk"][-len(options) :] == options
    assert asked["collect"][-6:] == ["--model", "m", "--template", "a=1", "--template", "b=2"]
    assert "--kv-bits" not in asked["collect"]


@pytest.mark.parametrize(
    ("given", "named"),
    [([], "absent"), (["--methods", "eagle4"], "eagle4")],
    ids=["file", "method"],
)
def test_what_cannot_be_measured_is_said_before_anything_is(tmp_path, given, named):
    with pytest.raises(DFlashError, match=named):
        compare_methods.main(
            ["--prompts", str(tmp_path / "absent"), "--out", str(tmp_path / "out"), *given]
        )
    assert not (tmp_path / "out").exists()
