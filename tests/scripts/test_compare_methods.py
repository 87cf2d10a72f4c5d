"""Methods compared: a walk over a known answer counts what decoding counts; then one table."""

from __future__ import annotations

from dataclasses import replace
from shutil import copytree
from typing import Any

import compare_methods
import pytest
import simulate_trees as script

from dflash_mlx.benchmark.selection import read_methods
from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.paper import KNOBS
from dflash_mlx.train.rows import CorpusRow
from dflash_mlx.verifier.model import Target
from support.decoding import answer_rounds as answer
from support.families import make_model
from support.pairs import full_pair
from support.tiny_training import corpus_rows

METHODS = (
    "dflash:8,dflash:3,d2sd:growth=paper,d2sd:budget=12,ddtree:budget=7,ngram:16,"
    "specdiff:8:steps=2,specdiff:budget=9,eagle3:4,eagle3:budget=9"
)
PROMPT = [5, 9, 5, 9, 5, 3]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = Target(make_model("llama"), 200, "tiny")
    return full_pair(tmp_path_factory.mktemp("pair"), target)


def decoded(pair, config):
    """The answer, and how many tokens and rows each round had that took a pass."""
    found = [r.accepted for r in answer(pair.target, make_drafter(pair, config), PROMPT, config)]
    tokens = [token for accepted in found for token in accepted.tokens]
    return tokens, [(len(accepted.path), len(accepted.tree)) for accepted in found[1:]]


def test_a_model_that_drafts_alone_is_walked_with(place, capsys):
    rows = [row for row in corpus_rows() if row.temperature == 0]
    corpus, own = place.write("greedy.jsonl", rows), copytree(place.model, place.root / "own")
    models = ["--model", str(place.model), "--drafter", str(own)]
    script.main(["--corpus", str(corpus), *models, "--methods", "lm:4"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("lm:4"))
    rounds = sum(-(-(len(row.answer) - 1) // 4) for row in rows)
    expected = sum(len(row.answer) - 1 for row in rows) / rounds
    assert f" {expected:.2f} (" in line, "a target that drafts for itself is always right"


def test_simulated_rounds_are_those_of_decoding(pair):
    config = DecodeConfig(max_tokens=60)
    methods = {n: c for n, c in read_methods(METHODS, config, KNOBS).items() if n != "none"}
    text, _ = decoded(pair, DecodeConfig(method="none", max_tokens=60))
    row = CorpusRow("a", "math", tuple(PROMPT), tuple(text), 0.0)
    with script.remembering() as memory:
        counts = script.simulate(pair, dict(script.made(pair, methods)), [row, row], memory)
    assert set(counts) == {*methods, "d2sd:growth=paper alone", "d2sd:budget=12 alone"}
    for name, method in methods.items():
        found, rounds = decoded(pair, method)
        assert found == text
        sums = sum(tokens for tokens, _ in rounds), len(rounds), sum(rows for _, rows in rounds)
        assert counts[name].answers == {"math": [sums] * 2, "all": [sums] * 2}
    told = counts["ngram:16"].figures()["math"]
    assert told["answers"] == 2 and told["mean_accepted"] > 1, "something was accepted"
    assert told["intervals"]["mean_accepted"] == [told["mean_accepted"]] * 2


def test_drawn_answers_are_walked_as_decoding_draws_them(pair):
    """What the target draws with a seed does not depend on the drafts."""
    config = DecodeConfig("ddtree", budget=7, max_tokens=60, sampling=SamplingConfig(1.0, seed=3))
    text, rounds = decoded(pair, config)
    plain, _ = decoded(pair, DecodeConfig("none", max_tokens=60, sampling=config.sampling))
    greedy, _ = decoded(pair, DecodeConfig("none", max_tokens=60))
    assert text == plain != greedy
    row = CorpusRow("a", "math", tuple(PROMPT), tuple(text), 1.0)
    with script.remembering() as memory:
        counts = script.simulate(pair, {"tree": make_drafter(pair, config)}, [row], memory)
    ((_, count, nodes),) = counts["tree"].answers["all"]
    assert (count, nodes) == (len(rounds), sum(rows for _, rows in rounds))


def test_answers_of_several_temperatures_are_no_sample_of_one(tmp_path):
    file, row = tmp_path / "answers.jsonl", CorpusRow("a", "math", (1, 2), (3,), 1.0)
    file.write_text("\n".join(each.as_line() for each in (row, replace(row, id="b"))))
    assert len(script.read_answers(file, 9)) == 2
    file.write_text("\n".join(each.as_line() for each in (row, replace(row, temperature=0.0))))
    with pytest.raises(DFlashError, match="0 .*1 "):
        script.read_answers(file, 9)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--methods", "none"], "'none'"),
        (["--methods", "d2sd"], "'d2sd'"),
        (["--methods", "dflash"], "'dflash'"),
        (["--methods", "ddtree:4"], "'ddtree:4'"),
        (["--methods", "dflash:8", "--every", "0"], "--every is 0"),
        (["--methods", "dflash:8", "--temperature", "1"], "--acceptance match"),
        (["--methods", "specdiff:steps=1"], "'specdiff:steps=1'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, value):
    with pytest.raises(DFlashError, match=value):
        script.main(["--corpus", "none", *options])


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
