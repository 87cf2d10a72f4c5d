"""Walking a known answer counts what decoding it counts."""

from __future__ import annotations

from dataclasses import replace

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
        (["--methods", "specdiff", "--sweep", "steps"], "--sweep steps has no values"),
        (["--methods", "specdiff", "--sweep", "steps=1,2"], "'specdiff:steps=1'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, value):
    with pytest.raises(DFlashError, match=value):
        script.main(["--corpus", "none", *options])
