"""All operations: their table, random calls, what they refuse, and calls that are planned."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import cascade_attention as attention
from kernels_metal import verify_qmm as products
from kernels_metal.cache_commit import CACHE_COMMIT, accepted_rows
from kernels_metal.cascade_attention import (
    CASCADE_ATTENTION,
    AttentionPlan,
    Packed,
    cascade_attention,
)
from kernels_metal.catalog import CATALOG, OPERATIONS
from kernels_metal.delta_net import DELTA_NET, Before, Mixer, Tape, delta_net
from kernels_metal.draft_head import DRAFT_HEAD, draft_head
from kernels_metal.emulator import emulated
from kernels_metal.factory import SOURCE
from kernels_metal.norm_rope import NORM_ROPE, HeadNorm, norm_rope
from kernels_metal.sweep import Trial, error, trials
from kernels_metal.verify_qmm import VERIFY_QMM, Packing, Product, verify_qmm
from kernels_metal.visibility import Visibility
from support.kernels import arguments, random_calls, recorded, refused


def test_every_source_file_is_a_body_or_header_of_the_table():
    kernels = [kernel for operation in OPERATIONS for kernel in operation.kernels]
    used = {k.path for k in kernels} | {k.header_path for k in kernels if k.header_path}
    assert used == set(SOURCE.glob("*.metal"))
    assert CATALOG.keys() == {kernel.name for kernel in kernels}


def test_every_operation_and_kernel_is_described():
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    for name in (*CATALOG, *(operation.name for operation in OPERATIONS)):
        assert f"`{name}`" in text


def test_a_seed_names_the_same_trials_of_every_operation():
    once, again = ([t.label for t in trials(3, 2)] for _ in range(2))
    assert once == again != [t.label for t in trials(4, 2)]
    assert [t.operation for t in trials(3, 1)] == list(OPERATIONS)


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_kernels_stay_within_rounding_of_their_references_in_random_calls(made):
    with emulated() as run:
        for given in random_calls(made):
            label = [getattr(argument, "shape", argument) for argument in given]
            for way in made.ways(*given):
                one = replace(made, kernel=made.by(way))
                assert error(Trial(one, given, "")) <= 1, (label, way)
    assert {counters.kernel for counters in run.counters} == {k.name for k in made.kernels}


# Faults that show in few calls: the operation, its source, what stands there and what becomes of it
RARE = {
    "a group is left out where K has three": (
        VERIFY_QMM, "verify_qmm_matrix", "g < groups;", "g < groups - (groups == 3 ? 1 : 0);"),
    "a row sees the one key of a tile that its window hides": (
        CASCADE_ATTENTION, "cascade_attention", "tile < clear", "tile + 1 < clear"),
    "no epsilon": (NORM_ROPE, "norm_rope", " + epsilon[0]", ""),
    "a fast cosine": (NORM_ROPE, "norm_rope", "precise::cos", "fast::cos"),
    "an unnamed cosine, which is a fast one": (NORM_ROPE, "norm_rope", "precise::cos", "cos"),
}  # fmt: skip


def size(call: Any) -> int:
    """So that small calls, which are quick, come first."""
    return sum(array.size for array in call if isinstance(array, mx.array))


@pytest.mark.parametrize(("made", "name", "before", "after"), RARE.values(), ids=RARE)
def test_random_calls_find_a_fault_that_shows_in_few_of_them(made, name, before, after, tmp_path):
    copy = shutil.copytree(SOURCE, tmp_path / "source")
    source = (copy / f"{name}.metal").read_text()
    assert source.count(before) == 1
    (copy / f"{name}.metal").write_text(source.replace(before, after))
    with emulated(copy):
        assert any(
            error(Trial(replace(made, kernel=made.by(way)), given, "")) > 1
            for given in sorted(random_calls(made), key=size)
            for way in made.ways(*given)
            if way != "scalar"
        )


def test_a_fault_is_an_error_above_one():
    for trial in trials(0, 1):
        made = trial.operation
        for wrong in (0, 1):
            added = iter((wrong, 0))  # to the kernel's result, and to the reference's

            def compared(*given, made=made, added=added):
                first, *rest = made.compared(*given)
                return [first + next(added), *rest]

            same = replace(made, kernel=made.reference, compared=compared)
            assert (error(replace(trial, operation=same)) > 1) == wrong


RANDOM = (mx.random.normal((2, 9), key=mx.random.key(0)), 3)
EQUAL = (mx.zeros((2, 9)), 3)


@pytest.mark.parametrize(
    ("arguments", "ids", "right"),
    [
        (RANDOM, lambda ids: ids, True),
        (RANDOM, lambda ids: ids[:, ::-1], False),
        (RANDOM, lambda ids: ids - 1000, False),
        (RANDOM, lambda ids: ids + 1000, False),
        (EQUAL, lambda ids: mx.array([[0, 1, 2], [8, 4, 6]]), True),
        (EQUAL, lambda ids: mx.array([[0, 1, 9]] * 2), False),
        (EQUAL, lambda ids: mx.array([[-1, 1, 2]] * 2), False),
    ],
)
def test_wrong_ids_are_an_error_but_of_equal_logits_any_is_right(arguments, ids, right):
    def kernel(logits, k):
        head = DRAFT_HEAD.reference(logits, k)
        return replace(head, ids=ids(head.ids))

    found = error(Trial(replace(DRAFT_HEAD, kernel=kernel), arguments, "by hand"))
    assert (found == 0) is right and (found > 1) is not right


def test_the_reference_is_computed_on_the_cpu_and_the_kernel_is_not(monkeypatch):
    """On Linux all is on the CPU, so what is looked at is the request."""
    seen = []
    trial = next(trials(0, 1))
    made = trial.operation

    def spy(name):
        return lambda *arguments: seen.append(name) or made.reference(*arguments)

    monkeypatch.setattr(mx, "stream", lambda device: seen.append(device) or nullcontext())
    error(replace(trial, operation=replace(made, kernel=spy("kernel"), reference=spy("reference"))))
    assert seen == ["kernel", mx.cpu, "reference"]


# Refusals: the arguments of a call that is taken, and what is changed in it


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


def packed(**changes):
    stored = Packed(*mx.quantize(zeros(1, 2, 25, 64), group_size=64, bits=4))
    return stored._replace(**{name: change(stored) for name, change in changes.items()})


def products_of(rows, dtype=mx.float32):
    return tuple(zeros(1, rows, width, dtype=dtype) for width in (1024, 4, 4))


def before_pass(convolved, dtype=mx.float32, tape=None):
    return Before(zeros(1, convolved, 1024), zeros(1, 4, 128, 128, dtype=dtype), tape)


def taped_of(path, heads=2):
    return Tape(zeros(1, 3, heads, 128), zeros(1, 3, 4), zeros(1, 3, 4, 128), path)


# By what is called: an operation and sizes of a call that it takes
TAKEN = {
    cascade_attention: (CASCADE_ATTENTION, {"dim": 64, "heads": 4, "rows": 5, "prefix": 20}),
    draft_head: (DRAFT_HEAD, {"rows": 2, "vocabulary": 50, "k": 2}),
    accepted_rows: (CACHE_COMMIT, {"caches": 2, "rows": 2, "prefix": 6}),
    verify_qmm: (VERIFY_QMM, {"rows": 4, "depth": 128, "columns": 6, "group": 32}),
    norm_rope: (NORM_ROPE, {"rows": 8, "heads": 2}),
    delta_net: (DELTA_NET, {"rows": 4, "taped": 3}),
}


def call_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments that it takes, by their names."""
    if function is Visibility:
        return {"prefix": 10, "local": np.ones((2, 2), bool)}
    if function is Packing:
        return {"bits": 4, "group": 32}
    operation, sizes = TAKEN[function]
    return dict(zip(signature(function).parameters, arguments(operation, **sizes), strict=False))


def normed_by(weight: mx.array) -> HeadNorm:
    return HeadNorm(weight, zeros(128), zeros(64), 1e-6)


GATED = {"packing": Packing(4, 32, gated=True), "way": "scalar"}
ODD = {"weights": zeros(15, 16, dtype=mx.uint32), "scales": zeros(15, 4), "biases": zeros(15, 4)}
REFUSED: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    cascade_attention: [
        ({"queries": zeros(1, 4, 5, 72)}, "head dim of queries is 72, but must be one of 64, 80, "),
        ({"queries": zeros(1, 4, 97, 64)}, "rows of queries is 97, but must be 1 to 96"),
        ({"queries": zeros(1, 4, 4, 64)}, "rows of local is 5, but must be 4, those of queries"),
        ({"queries": zeros(1, 3, 5, 64)}, "heads of queries is 3, .* a multiple of the 2 of keys"),
        ({"queries": zeros(1, 4, 5, 64, dtype=mx.int32)}, "queries is int32, but must be float32"),
        ({"seen": Visibility(21, np.tri(5, dtype=bool))}, "21 keys of prefix and 5 .* 25 slots"),
        ({"keys": zeros(1, 2, 25, 64, dtype=mx.float16)}, "of keys is float16, .* float32"),
        ({"values": zeros(1, 2, 24, 64)}, r"of values is \[1, 2, 24, 64\], .* 25, 64\]"),
        ({"keys": zeros(2, 25, 64)}, r"of keys is \[2, 25, 64\], but .* \[1, any, any, 64"),
        ({"sinks": zeros(3)}, r"shape of sinks is \[3\], but must be \[4\]"),
        ({"scale": float("inf")}, "scale is inf, but must be finite"),
        ({"keys": packed()}, "values is an array, but must be packed, as keys are"),
        ({"values": packed()}, "values is packed, but must be an array, as keys are"),
        ({"keys": packed(words=lambda p: p.words[..., :6])}, "bits of keys is 3, .* 4, 8"),
        ({"keys": packed(), "values": packed(biases=lambda p: p.scales[..., :0])}, "biases of val"),
    ],
    Visibility: [
        ({"prefix": -1}, "prefix is -1, but must be 0 or more"),
        ({"local": np.ones((97, 2), bool)}, "rows of local is 97, but must be 1 to 96"),
        ({"local": np.ones((2, 1025), bool)}, "columns of local is 1025, but must be 1 to 1024"),
        ({"local": np.ones((2, 2), np.int32)}, r"local is int32 \[2, 2\], .* bool \[R, N\]"),
        ({"local": np.ones(3, bool)}, r"local is bool \[3\], but must be bool \[R, N\]"),
        ({"first": (0,)}, "length of first is 1, but must be 2"),
        ({"first": (0, 11)}, r"first\[1\] is 11, but must be 0 to 10"),
        (
            {"local": np.zeros((2, 2), bool), "first": (0, 10)},
            r"local\[1\] is all False, .* nothing",
        ),
    ],
    draft_head: [
        ({"k": 17}, "k is 17, but must be 1 to 16"),
        ({"k": 0}, "k is 0, but must be 1 to 16"),
        ({"logits": zeros(2, 5), "k": 6}, "k is 6, but must be up to the 5 columns of logits"),
        ({"logits": zeros(1025, 5)}, "rows of logits is 1025, but must be 1 to 1024"),
        ({"logits": zeros(1, 2, 50)}, r"of logits is \[1, 2, 50\], but must be \[any, any\]"),
        ({"logits": zeros(2, 50, dtype=mx.int32)}, "logits is int32, but must be float32"),
    ],
    accepted_rows: [
        ({"path": []}, r"path is \[\], but must be one or more increasing rows"),
        ({"path": [-1, 2]}, r"path is \[-1, 2\], but must be one or more increasing rows"),
        ({"first": [0]}, "length of first is 1, but must be 2"),
        ({"path": [0, 2], "first": [0, 8]}, r"first\[1\] is 8, .* 0 to 7, .* inside 10 slots"),
        ({"caches": [], "first": []}, "number of caches is 0, but must be 1 or more"),
        ({"caches": [zeros(1, 2, 10, 4), zeros(1, 2, 10, 4, dtype=mx.int8)]}, r"\[1\] is int8, "),
    ],
    verify_qmm: [
        ({"x": zeros(33, 128)}, "rows of x is 33, but must be 1 to 32"),
        ({"x": zeros(4, 100)}, r"shape of x is \[4, 100\], but must be \[4, 128\]"),
        ({"x": zeros(2, 17, 128)}, "rows of x is 34, but must be 1 to 32"),
        ({"x": zeros(4, 128, dtype=mx.float16)}, "dtype of x is float16, but must be float32"),
        ({"weights": zeros(6, 15, dtype=mx.uint32)}, "for is 120, .* multiple of 32"),
        ({"weights": zeros(6, 16, dtype=mx.int32)}, "weights is int32, but must be uint32"),
        ({"biases": zeros(6, 5)}, r"shape of biases is \[6, 5\], but must be \[6, 4\]"),
        ({"weights": zeros(16, 6, dtype=mx.uint32).T}, r"strides is \(4, 24\), .* contiguous"),
        ({"scales": zeros(6, 8)[:, ::2]}, r"strides is \(32, 8\), but must be contiguous"),
        ({**ODD, **GATED}, "rows of weights is 15, but must be even"),
        ({"x": zeros(17, 128), **GATED}, "rows of x is 17, but must be 1 to 16"),
    ],
    Packing: [
        ({"bits": 3}, "bits is 3, but must be one of 4, 6, 8"),
        ({"group": 16}, "group is 16, but must be one of 32, 64, 128"),
    ],
    norm_rope: [
        ({"keys": zeros(1, 7, 256)}, r"of keys is \[1, 7, 256\], but must be \[1, 8, any\]"),
        ({"queries": zeros(1, 8, 1000)}, "of queries is 1000, but must be a multiple of 128"),
        ({"queries": zeros(1, 97, 128)}, "rows of queries is 97, but must be 1 to 96"),
        ({"positions": zeros(8)}, "dtype of positions is float32"),
        ({"norm": normed_by(zeros(128, dtype=mx.int8))}, "query_weight is int8, .* be float32"),
        ({"norm": normed_by(zeros(72))}, "the head dim is 72"),
    ],
    delta_net: [
        ({"products": products_of(33)}, "rows of qkv is 33, but must be 1 to 32"),
        ({"products": products_of(4, mx.float16)}, "dtype of qkv is float16"),
        ({"mixer": Mixer(zeros(1024, 4, 1), *[zeros(4)] * 2, 3)}, "the head dim is 102"),
        ({"mixer": Mixer(zeros(1024, 9, 1), *[zeros(4)] * 2, 2)}, "taps of .* is 9"),
        ({"mixer": Mixer(zeros(1152, 4, 1), *[zeros(5)] * 2, 2)}, "values is 5, .* multiple of 2"),
        ({"before": before_pass(4)}, r"shape of convolved is \[1, 4, 1024\]"),
        ({"before": before_pass(3, mx.float16)}, "dtype of state is float16"),
        ({"before": before_pass(3, tape=taped_of([0, 3]))}, r"its path is \[0, 3\]"),
        ({"before": before_pass(3, tape=taped_of([0], 3))}, r"tape's k is \[1, 3, 3, 128\]"),
        ({"parents": (-1, 0, 2, 1)}, r"parents is \[-1, 0, 2, 1\], but must be 4 earlier rows"),
    ],
}


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [(call, *row) for call, rows in REFUSED.items() for row in rows],
)
def test_what_a_call_refuses_before_anything_is_launched(call, changes, message):
    with refused(message):
        call(**call_of(call) | changes)


# Calls that are planned


def attend(layers: int):
    queries, keys, values, seen, scale, _ = arguments(
        CASCADE_ATTENTION, dim=64, heads=4, kv_heads=2, rows=3, prefix=20
    )
    planned = AttentionPlan(queries, keys, seen, scale)
    for layer in range(layers):
        yield (
            lambda layer=layer: planned(queries, keys + layer, values, None),
            lambda layer=layer: cascade_attention(queries, keys + layer, values, seen, scale),
        )


def multiply(times: int):
    x, *weights = arguments(VERIFY_QMM, rows=6, depth=128, columns=40)
    planned = Product(*weights)
    for time in range(times):
        yield (
            (lambda time=time: planned(x + time)),
            (lambda time=time: verify_qmm(x + time, *weights)),
        )


@pytest.mark.parametrize(("made", "module"), [(attend, attention), (multiply, products)])
def test_a_plan_serves_more_calls_and_checks_and_makes_nothing_for_them(made, module, monkeypatch):
    with emulated():
        for planned, anew in made(3):
            assert mx.array_equal(planned(), anew())
    with recorded() as samples:
        for planned, _ in made(2):
            planned()
            for name in ("check_array", "check_range", "layout", "Launch", "Prepared"):
                monkeypatch.setattr(module, name, None, raising=False)
    (_, first, plan), (_, second, again) = samples
    changing = {attend: {1}, multiply: {0}}[made]
    same = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a is b]
    assert plan is again and {*range(len(first))} - set(same) == changing
