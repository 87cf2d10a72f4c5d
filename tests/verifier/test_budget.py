"""Pass times are measured once and kept."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.system.machine import model_of
from dflash_mlx.verifier import pass_times as budget
from dflash_mlx.verifier.model import Target
from dflash_mlx.verifier.pass_times import PassTimes, calibrating, keep_times, stored_times
from support.experts import MIXTURES, Touched
from support.families import VOCAB_SIZE, make_model

FLAT = PassTimes((1, 96), (1.0, 1.0))
TREES = PassTimes((1, 4), (1.0, 2.5))


def test_times_are_interpolated_and_never_fall():
    times = PassTimes((1, 2, 4), (1.0, 3.0, 2.0))
    assert times.of(np.array([1, 2, 3, 4, 9])).tolist() == [1.0, 2.0, 2.0, 2.0, 2.0]
    seen = PassTimes((1, 4, 8, 12), (0.586, 0.130, 0.704, 0.187))  # in a busy moment
    assert seen.of(np.array([1, 4, 8, 12])).tolist() == [0.130, 0.130, 0.187, 0.187]
    assert PassTimes((1, 3), (1.0, 2.0)).of(7) == 4.0, "on the line through the last two"


@pytest.mark.parametrize(
    ("context", "one", "three"),
    [(0, 1, 2), (128, 1, 2), (564, 1.5, 4), (1000, 2, 6), (1500, 3, 8), (3000, 6, 14)],
)
def test_times_rise_with_the_context_beyond_what_was_measured(context, one, three):
    """And where a longer context seemed faster, it is taken to be as slow as the shorter one."""
    deep = PassTimes((1, 3), (2.0, 6.0), 1000), PassTimes((1, 3), (4.0, 10.0), 2000)
    times = PassTimes((1, 3), (1.0, 2.0), 128, deep)
    assert times.of(np.array([1, 3]), (context,)) == pytest.approx([one, three])
    assert times.of(1, (context, context)) == pytest.approx(one)
    fast = PassTimes((1, 3), (1.0, 2.0), 128, (PassTimes((1, 3), (0.5, 1.0), 1000),))
    assert fast.of(np.array([1, 3]), (context,)).tolist() == [1.0, 2.0]


def test_times_behind_what_was_measured_are_never_less_for_more_rows():
    """Lines through two times each would be at 4, 3 and 9: an error grows with the context."""
    deep = PassTimes((1, 2, 3), (1.0, 1.8, 3.0), 1000), PassTimes((1, 2, 3), (2.0, 2.2, 5.0), 2000)
    times = PassTimes((1, 2, 3), (1.0, 1.5, 2.0), 128, deep)
    assert times.of(np.array([1, 2, 3]), (4000,)).tolist() == pytest.approx([3, 3, 9])
    assert float(times.of(1, (4000,))) == pytest.approx(3)


def test_many_rows_behind_a_long_context_take_no_less_than_behind_a_short_one():
    deep = PassTimes((1, 2), (3.0, 3.2), 1000)
    times = PassTimes((1, 2), (1.0, 2.0), 128, (deep,))
    assert times.of(np.array([1, 2, 10]), (1872,)).tolist() == pytest.approx([4.4, 4.4, 10])
    assert float(times.of(10, (128,))) == 10


@pytest.fixture
def target():
    return Target(make_model("llama"), 200, "tiny")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "ministral3"])
def test_a_target_can_be_timed_and_is_as_it_was_afterwards(family, monkeypatch, tmp_path):
    target = Target(make_model(family), 1000, "tiny")
    monkeypatch.setattr(budget, "ROWS", (1, 3))
    monkeypatch.setattr(budget, "DEEP_ROWS", (1, 3))
    monkeypatch.setattr(budget, "CONTEXTS", (128, 300, 2000))
    monkeypatch.setattr(budget.platformdirs, "user_cache_path", lambda name: tmp_path)
    tokens = mx.array([1, 2, 3]) % VOCAB_SIZE
    before = target.forward(tokens, target.new_cache(), budget.Block(3))[0]
    steps = list(calibrating(target))
    times = target.pass_times
    assert {len(steps)} == {*steps}, "each says how many there are"
    assert times.rows == (1, 3) and min(times.seconds) > 0
    (deep,) = times.deeper
    assert deep.context == 300 and deep.rows == (1, 3), "2,000 do not fit"
    assert (times.trees is None) == (family != "qwen3_5"), "where trees take longer than chains"
    after = target.forward(tokens, target.new_cache(), budget.Block(3))[0]
    assert mx.array_equal(before, after)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_contexts_whose_caches_the_memory_has_no_room_for_are_not_timed(family, monkeypatch):
    target = Target(make_model(family), 20000, "tiny")
    monkeypatch.setattr(budget, "ROWS", (1, 3))
    monkeypatch.setattr(budget, "DEEP_ROWS", (1, 3))
    cache = target.new_cache()
    mx.eval(target.forward(mx.zeros(1, mx.int32), cache, budget.Block(1))[0])
    cache.commit(range(1))
    cache.lengthen(4095)
    monkeypatch.setattr(budget, "free_memory", lambda: 9 * cache.nbytes)
    assert [deep.context for deep in times_of(target).deeper] == [1024, 4096]
    monkeypatch.setattr(budget, "free_memory", lambda: 30 * cache.nbytes)
    assert [deep.context for deep in times_of(target).deeper] == [1024, 4096, 16384]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_row_of_a_mixture_is_timed_with_experts_of_its_own(family, monkeypatch):
    """The clock counts experts, so a pass takes as many seconds as it touches of them."""
    target = Target(make_model(family, **{MIXTURES[family]: 32}), 1000, "tiny")
    monkeypatch.setattr(budget, "CONTEXTS", (128,))
    assert target.takes_trees, "which is tried before the passes that count"
    touched = Touched(target.model)
    clock = SimpleNamespace(perf_counter=lambda: float(sum(touched.counts())))
    monkeypatch.setattr(budget, "time", clock)
    monkeypatch.setattr(budget, "ROWS", (1, 2, 8, 32))
    monkeypatch.setattr(budget, "_REPEATS", 1)
    one, two, eight, many = times_of(target).seconds
    layers = len(touched.counts()) // 10  # the first word, a prompt, two passes of each size
    assert one == 2 * layers
    assert one < two < eight < many > 4 * one


def times_of(target):
    steps = budget.measuring(target)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def test_what_branches_add_is_what_trees_took_longer_and_never_less_than_nothing():
    times = PassTimes((1, 3), (1.0, 2.0), trees=PassTimes((1, 2, 3), (0.5, 2.0, 4.0)))
    assert times.branching(np.array([1, 2, 3])).tolist() == [0.0, 0.5, 2.0]
    assert replace(times, trees=None).branching(np.array([1, 3])).tolist() == [0.0, 0.0]
    assert times.of(3) == 2.0, "of chains"


def test_times_are_kept_for_each_model(target, monkeypatch, tmp_path):
    monkeypatch.setattr(budget, "ROWS", (1, 2))
    times = PassTimes((1, 2), (1.0, 2.0), trees=TREES)
    assert stored_times(target, tmp_path) is None
    keep_times(target, times, tmp_path)
    assert target.pass_times is times and stored_times(target, tmp_path) == times
    other = Target(make_model("llama"), 200, "another")
    assert stored_times(other, tmp_path) is None
    keep_times(other, times, tmp_path)
    assert {model_of(file) for file in tmp_path.iterdir()} == {target.name, "another"}
    target.kv_bits = 8
    assert stored_times(target, tmp_path) is None, "of another kind of storage"


DAMAGES = [
    "{",
    "[]",
    json.dumps({"rows": [1, 96], "seconds": [1.0, 1.0]}),
    json.dumps(asdict(PassTimes((1, 96), (1.0,)))),
    json.dumps(asdict(PassTimes((1, 96), (0.0, 1.0)))),
    json.dumps(asdict(PassTimes((1, 2), (1.0, 1.0)))),
    json.dumps(asdict(FLAT) | {"trees": {"rows": [1]}}),
    json.dumps({key: value for key, value in asdict(FLAT).items() if key != "trees"}),
    json.dumps(asdict(PassTimes((1, 96), (1.0, 1.0), deeper=(FLAT,)))),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_times_are_as_none(target, monkeypatch, tmp_path, damage):
    monkeypatch.setattr(budget, "ROWS", FLAT.rows)
    keep_times(target, FLAT, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert stored_times(target, tmp_path) is None


def test_times_that_cannot_be_kept_are_used_all_the_same(target, tmp_path):
    (tmp_path / "file").write_text("")
    keep_times(target, FLAT, tmp_path / "file")
    assert target.pass_times == FLAT
