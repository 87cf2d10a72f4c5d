"""Which of kernel and reference runs, and the reason in the table."""

import json

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal import dispatch, factory, operations
from kernels_metal.dispatch import Choice, Dispatch, Operation, bucket, table_from_json
from kernels_metal.emulator import emulated
from kernels_metal.verify_qmm import Packing
from support import kernel_cases as cases


def operation(kernel=lambda x: x + 1, check=lambda x: None):
    """An operation on one array whose reference adds 1."""
    return Operation(
        "add",
        kernel,
        lambda x: x + 1,
        check,
        lambda x: (bucket(x.shape[0]), (), x.itemsize * 8, dispatch.dtype_name(x.dtype)),
        lambda y, x: [y],
    )


class Clock:
    """Moves on by the next of `steps` between every two looks."""

    def __init__(self, *steps):
        self.steps, self.now, self.looks = steps, 0.0, 0

    def __call__(self):
        race, self.looks = self.looks // 2 // dispatch.RUNS, self.looks + 1
        self.now += self.steps[race] if self.looks % 2 == 0 else 0.0
        return self.now


@pytest.fixture
def on_metal(monkeypatch):
    """As if MLX ran kernels here."""
    monkeypatch.setattr(dispatch, "executor", lambda: factory.metal)


@pytest.fixture
def no_metal(monkeypatch):
    """As on Linux, also where these tests run on a Mac."""
    monkeypatch.setattr(dispatch, "executor", lambda: None)


def elsewhere(kernel, inputs, plan):
    raise AssertionError("not called")


def choose(mode="auto", steps=(1.0, 2.0), made=None, x=None, table=None):
    kernels = Dispatch(mode, table, family="applegpu_g15s", clock=Clock(*steps))
    x = mx.ones(3) if x is None else x
    return kernels, kernels.choose(operation() if made is None else made, x)


def test_without_metal_the_reference_runs_in_every_mode(no_metal):
    for mode in ("auto", "on"):
        kernels, choice = choose(mode)
        assert choice == Choice(False, "no Metal on this machine")
        assert kernels.choices == {}


def test_off_is_the_reference_even_where_kernels_run(on_metal):
    assert choose("off")[1] == Choice(False, "kernels are switched off")


def test_the_faster_side_wins_the_race_and_the_times_are_the_reason(on_metal):
    assert choose(steps=(1.0, 2.0))[1] == Choice(True, "faster: 1000000 us against 2000000 us")
    assert choose(steps=(2.0, 1.0))[1] == Choice(False, "not faster: 2000000 us against 1000000 us")


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_a_kernel_that_disagrees_is_not_used_however_fast(on_metal, wrong):
    choice = choose(made=operation(lambda x: x + 1 + wrong))[1]
    assert not choice.kernel
    assert choice.reason.startswith("differs from the reference by ")


@pytest.mark.parametrize(("wrong", "used"), [(0.0, True), (0.01, False)])
def test_equal_infinities_agree_and_hide_no_other_difference(on_metal, wrong, used):
    x = mx.array([1.0, -mx.inf, mx.inf])
    assert choose(x=x, made=operation(lambda x: x + 1 + wrong))[1].kernel is used
    assert dispatch.difference(mx.array([1.0, 2.0]), x[:2]) == mx.inf


def test_integers_must_agree_exactly(on_metal):
    x = mx.array([1, 2, 100_000_000])
    assert choose(x=x)[1].kernel
    assert not choose(x=x, made=operation(lambda x: x + 2))[1].kernel


def test_an_unsupported_case_takes_the_reference_with_the_refusal_as_reason(on_metal):
    def refuse(x):
        raise ValueError("the head dim is 72")

    for mode in ("auto", "on"):
        assert choose(mode, made=operation(check=refuse))[1] == Choice(False, "the head dim is 72")


def test_a_case_is_raced_once_and_the_table_survives_as_json(on_metal):
    kernels, first = choose()
    assert kernels.choose(operation(), mx.zeros(4)) is first  # as many rows, rounded up
    assert list(kernels.table) == ["add/4//32/float32/applegpu_g15s"]
    saved = table_from_json(json.loads(json.dumps(kernels.to_json())))
    assert choose(steps=(), table=saved)[1] == first
    with pytest.raises(IndexError):  # this one has to race again, and its clock has no steps
        choose(steps=(), table=saved, x=mx.ones(5))


def test_a_table_of_other_kernels_or_another_mlx_is_made_anew(on_metal, monkeypatch):
    saved = choose()[0].to_json()
    assert len(table_from_json(saved)) == 1
    monkeypatch.setattr(dispatch, "version", lambda package: "0.99")
    assert table_from_json(saved) == {}


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_kernel_that_metal_refuses_is_not_used_and_says_why(on_metal, kind):
    """ValueError: MLX's for a threadgroup that needs more registers than there are."""

    def refused(x):
        raise kind("[metal::Device] Unable to build metal library from source\nline 3")

    reason = "does not run here: [metal::Device] Unable to build metal library from source"
    assert choose(made=operation(refused))[1] == Choice(False, reason)
    with pytest.raises(kind, match="Unable to build"):
        Dispatch("on", family="").run(operation(refused), mx.ones(3))


def test_what_was_not_raced_is_shown_but_not_saved(on_metal):
    kernels, choice = choose("on")
    assert choice == Choice(True, "kernels are switched on")
    assert list(kernels.choices.values()) == [choice]
    assert kernels.table == {}


def test_another_executor_runs_the_kernel_without_a_race():
    with factory.executing(elsewhere):
        kernels, choice = choose()
    assert choice == Choice(True, "not on Metal, so not raced")
    assert kernels.table == {}


def test_run_calls_the_chosen_side(on_metal):
    made = operation(lambda x: x + 1 + 1e-5)
    exact, off = mx.ones(3), mx.full(3, 2.0)
    fast = Dispatch("auto", family="", clock=Clock(1.0, 2.0))
    slow = Dispatch("auto", family="", clock=Clock(2.0, 1.0))
    assert not mx.array_equal(fast.run(made, exact), off)
    assert mx.array_equal(slow.run(made, exact), off)


def test_instances_do_not_see_each_others_choices(on_metal):
    one, other = choose()[0], Dispatch("auto", family="applegpu_g15s")
    assert one.table and not other.table


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="kernels is 'fast', but must be one of auto, off, on"):
        Dispatch("fast")


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 96), (96, 96), (97, 128)]
)
def test_sizes_are_rounded_up_to_powers_of_two_and_96(size, rounded):
    assert bucket(size) == rounded


def calls():
    """One call of each operation: its arguments and its case."""
    rng = np.random.default_rng(0)
    shape = cases.Attention(64, 4, 2, 5, 30)
    caches = [mx.ones((1, 2, 10, 4), mx.bfloat16)] * 3
    packing = Packing(4, 32)
    attention = shape.arguments(mx.float16)
    walk = tuple(mx.array(a) for a in cases.random_tree(rng, 9, True))
    product = cases.quantised(rng, 3, 64, 5, mx.float32, packing)
    return [
        (attention, "8/4x2x64x64x64x0/16/float16"),
        ((mx.ones((7, 40)), 5), "8/40x5/32/float32"),
        (walk, "16//32/int32"),
        ((caches, [1, 3], [0, 0, 2]), "2/3x2x4/16/bfloat16"),
        (product, "4/64x5x32x0/4/float32"),
    ]


@pytest.mark.parametrize("i", range(5), ids=[o.name for o in operations.OPERATIONS])
def test_every_operation_runs_and_names_its_case(i, monkeypatch):
    made, (arguments, case) = operations.OPERATIONS[i], calls()[i]
    kernels = Dispatch("auto", family="g1")
    reference = made.compared(made.reference(*arguments), *arguments)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "executor", lambda: None)
        stock = made.compared(kernels.run(made, *arguments), *arguments)
    for a, b in zip(stock, reference, strict=True):
        assert mx.array_equal(a, b)
    assert kernels.choices == {}
    with emulated() as run:
        result = kernels.run(made, *arguments)
    assert run.counters
    for a, b in zip(made.compared(result, *arguments), reference, strict=True):
        assert dispatch.difference(a, b) <= dispatch.TOLERANCES.get(dispatch.dtype_name(b.dtype), 0)
    assert list(kernels.choices) == [f"{made.name}/{case}/g1"]


@pytest.mark.parametrize(("i", "changed"), [(0, 1), (0, 2), (2, 1), (2, 2), (4, 2), (4, 3)])
def test_a_case_does_not_mix_dtypes_that_the_kernel_takes_and_refuses(i, changed):
    made, arguments = operations.OPERATIONS[i], list(calls()[i][0])
    taken = made.case(*arguments)
    made.check(*arguments)
    arguments[changed] = arguments[changed].astype(mx.bfloat16)
    with pytest.raises(ValueError, match="dtype"):
        made.check(*arguments)
    assert made.case(*arguments) != taken


def test_dtypes_that_differ_are_named_in_the_order_of_the_arguments():
    arguments, _ = calls()[0]
    sinks = mx.zeros(4, mx.bfloat16)
    assert operations.CASCADE_ATTENTION.case(*arguments[:5], sinks)[3] == (
        "float16+float16+float16+bfloat16"
    )
    caches = [mx.ones((1, 2, 10, 4), mx.bfloat16), mx.ones((1, 2, 10, 4))]
    assert operations.CACHE_COMMIT.case(caches, [1], [0, 0])[3] == "bfloat16+float32"
