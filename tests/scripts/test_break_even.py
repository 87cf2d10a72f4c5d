"""The simulated clock of D2SD's second pass goes on by what passes are said to take."""

from __future__ import annotations

import json

import break_even
import pytest
import simulate_trees

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.corpus.rows import CorpusRow
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes
from support import decoding
from support.drafter_formats import drafter_folder
from support.families import make_model

PROMPT = [5, 9, 5, 9, 5, 3]
PASSES = PassTimes((1, 64), (1.0, 1.0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = Target(make_model("llama"), 200, "tiny")
    first, second = (
        drafter_folder(tmp_path_factory.mktemp("drafter"), [0, 2], seed, target) for seed in (1, 2)
    )
    return Pair(target, None, (first, second), "x")


@pytest.mark.parametrize("second", [None, 1e-9, 100.0])
def test_the_clock_counts_every_pass_once(pair, second):
    text = decoding.answer(pair.target, NoDraft(), PROMPT, DecodeConfig(max_tokens=60))
    row = CorpusRow("a", "math", tuple(PROMPT), tuple(text), 0.0)
    both = make_drafter(pair, simulate_trees.NEEDS_TREES)
    walk = break_even.Simulated(both, break_even.Terms(PASSES, 0.01, second))
    begun, begin = [], walk.begin
    walk.begin = lambda *asked: begun.append(1) or begin(*asked)
    with simulate_trees.remembering() as memory:
        count = simulate_trees.simulate(pair, {"d2sd": walk}, [row], memory)["d2sd"]
    ((tokens, rounds, _),) = count.answers["all"]
    assert tokens == len(text) - 1
    spent = rounds + 0.01 * len(begun) + (second or 0.0) * walk.continued
    assert walk.now == pytest.approx(spent)
    assert (walk.continued > 0) == (second == 1e-9), "a second pass is made where it is free"


def test_at_the_cost_that_it_names_both_methods_are_as_fast(tmp_path):
    tokens = {"ddtree": {4: 2.2, 8: 2.9, 16: 3.3}, "d2sd": {4: 2.3, 8: 3.1, 16: 3.6}}
    report = {}
    for method, known in tokens.items():
        for n, found in known.items():
            count = simulate_trees.Count()
            count.add("math", [(round(100 * found), n), *[(0, n)] * 99])
            report[f"{method}:budget={n}"] = count.figures()
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps(report))
    *_, row = (line for line in break_even.by_counts(counts).splitlines() if "8B | 8" in line)
    terms, _ = break_even.terms_of("Qwen3-8B", 8, break_even.Traffic.read())
    plain = terms.passes.seconds[0]
    even = float(row.split("|")[-2].split()[0]) * plain

    def speed(method, beside):
        rounds = ((float(terms.passes.of(n)) + beside, a) for n, a in tokens[method].items())
        return max(tokens / seconds for seconds, tokens in rounds)

    first = terms.first
    assert speed("ddtree", first) > 1 / plain, "or it would be compared with plain decoding"
    assert speed("d2sd", first + even) == pytest.approx(speed("ddtree", first), rel=0.01)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"d2sd:budget=8": {}}', '{"d2sd": {}}'])
def test_a_file_without_counts_is_named(tmp_path, text):
    counts = tmp_path / "counts.json"
    if text is not None:
        counts.write_text(text)
    with pytest.raises(DFlashError, match=r"counts\.json"):
        break_even.by_counts(counts)


def test_a_second_draft_over_four_blocks_is_dearer_than_the_first():
    terms = [
        break_even.terms_of(name, bits, break_even.Traffic.read())
        for name in break_even.SIZES
        for bits in break_even.BITS
    ]
    for each, second in terms:
        assert 0 < each.first < second and each.second is None
        assert each.passes.seconds[0] < each.passes.seconds[-1]
