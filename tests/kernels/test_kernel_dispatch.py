"""Which of kernel and reference runs, and the reason in the table."""

import json
import os
from dataclasses import replace
from functools import partial
from itertools import accumulate

import mlx.core as mx
import pytest

from kernels_metal import dispatch, factory, gpu
from kernels_metal.catalog import OPERATIONS
from kernels_metal.dispatch import CALLS, Choice, Dispatch, table_from_json
from kernels_metal.emulator import emulated
from kernels_metal.gpu import gpu_family
from kernels_metal.operation import Operation, bucket, case_of
from support.kernels import arguments, clock


def operation(kernel=lambda x: x + 1, check=lambda x: None, **fields):
    """An operation on one array whose reference adds 1."""
    return Operation(
        **fields,
        name="add",
        kernel=kernel,
        reference=lambda x: x + 1,
        check=check,
        case=lambda x: case_of(x.shape[0], (), [x]),
        kernels=(),
        arguments=lambda draw: (draw.normal(3),),
        defaults={},
    )


@pytest.fixture(autouse=True)
def on_metal(monkeypatch):
    """As if MLX ran kernels here, unless a test says otherwise."""
    monkeypatch.setattr(dispatch, "executor", lambda: factory.metal)


def choose(mode="auto", steps=(1.0, 2.0), made=None, x=None, table=None, sides=2):
    kernels = Dispatch(mode, clock=clock(*steps, sides=sides))
    kernels.table.update(table or {})
    x = mx.ones(3) if x is None else x
    return kernels, kernels.choose(operation() if made is None else made, (x,))


def refused(kind, words):
    def raises(x):
        raise kind(words)

    return raises


@pytest.mark.parametrize(("steps", "faster"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_the_faster_side_wins_the_race_and_the_times_are_the_reason(steps, faster):
    words = "faster: 1000 us against 2000 us" if faster else "not faster: 2000 us against"
    choice = choose(steps=steps)[1]
    assert choice.kernel is faster and choice.reason.startswith(words)


@pytest.mark.parametrize("x", [[1.0, 1.0], [1.0, -float("inf"), float("inf")]])
@pytest.mark.parametrize(("wrong", "used"), [(0.0, True), (0.01, False), (float("nan"), False)])
def test_a_kernel_that_disagrees_is_not_used_however_fast(x, wrong, used):
    """Equal infinities agree, and hide no other difference."""
    choice = choose(x=mx.array(x), made=operation(lambda x: x + 1 + wrong))[1]
    assert choice.kernel is used
    assert choice.reason.startswith("faster: " if used else "differs from the reference by ")


def test_integers_must_agree_exactly_and_no_finite_number_is_near_an_infinite_one():
    x = mx.array([1, 2, 100_000_000])
    assert choose(x=x)[1].kernel
    assert not choose(x=x, made=operation(lambda x: x + 2))[1].kernel
    assert dispatch.difference(mx.array([1.0, 2.0]), mx.array([1.0, -mx.inf])) == mx.inf


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_an_unsupported_case_takes_the_reference_with_the_refusal_as_reason(mode):
    made = operation(check=refused(ValueError, "the head dim is 72"))
    assert choose(mode, made=made)[1] == Choice(False, "the head dim is 72")


def test_a_case_is_raced_once_and_the_table_survives_as_json():
    kernels, first = choose(x=mx.ones(60))
    assert kernels.choose(operation(), (mx.zeros(64),)) is first  # as many rows, rounded up
    assert list(kernels.table) == [f"add/64//32/float32/{gpu_family()}"]
    saved = table_from_json(json.loads(json.dumps(kernels.to_json())))
    assert choose(steps=(), table=saved, x=mx.ones(50))[1] == first
    with pytest.raises(StopIteration):  # this one has to race again, and its clock has no steps
        choose(steps=(), table=saved, x=mx.ones(5))


def test_up_to_32_rows_every_number_of_them_is_raced_by_itself():
    kernels, _ = choose(steps=(1.0, 2.0) * 4, x=mx.ones(5))
    for rows in (6, 31, 32):
        kernels.choose(operation(), (mx.ones(rows),))
    assert [key.split("/")[1] for key in kernels.table] == ["5", "6", "31", "32"]


def test_a_race_is_a_chain_through_the_layers_in_which_each_call_waits_for_the_last():
    seen, links = [], []

    def kernel(x):
        seen.append(x)
        return x + 1

    def after(out, x):
        links.append((out, x))
        return (mx.minimum(x, out),)

    layers = [(mx.full(3, float(i)),) for i in range(5)]
    made = operation(kernel, after=after)
    Dispatch("auto", clock(1.0, 2.0)).choose(made, (mx.ones(3),), layers)
    chains = seen[1:]  # after the probe
    assert len(chains) == dispatch.RUNS * CALLS
    stock = dispatch.RUNS + 2  # which also warms up
    assert len(links) == (dispatch.RUNS + stock) * (CALLS - 1)  # chained likewise
    assert [x.tolist()[0] for _, x in links[:6]] == [1, 2, 3, 4, 0, 1]


def test_copies_of_large_arrays_make_a_chain_where_no_layers_are_given():
    copies = []

    def copied(x):
        copies.append(x + 0)
        return (copies[-1],), [copies[-1]]

    assert choose(made=operation(copied=copied))[1].kernel
    assert len(copies) == 1 + CALLS  # one tells the size


def test_a_side_that_is_slow_is_timed_once_and_no_more():
    looks = []

    def slow():
        looks.append(len(looks) * 1.0)
        return looks[-1]

    choice = Dispatch("auto", slow).choose(operation(), (mx.ones(3),))
    assert not choice.kernel and len(looks) == 2 * (1 + 2)  # a warm-up and a run of each


def test_sides_take_turns_once_the_clock_of_the_gpu_is_up():
    """Stock seems slow at first: 4 ms, 2.5, then 1 as the kernel."""
    order = []

    def side(name):
        return lambda x: order.append(name) or x + 1

    made = replace(operation(side("kernel")), reference=side("stock"))
    runs = [4.0, 2.5, 1.0, 1.0, *[1.0, 1.0] * dispatch.RUNS]
    moves = (move * CALLS * 1e-3 for run in runs for move in (0.0, run))
    choice = Dispatch("auto", partial(next, accumulate(moves))).choose(made, (mx.ones(3),))
    assert choice == Choice(False, f"not faster: 1000 us against 1000 us, in chains of {CALLS}")
    _, _, *raced = order  # behind the probe
    turns = raced[4 * CALLS :]
    assert turns == (["kernel"] * CALLS + ["stock"] * CALLS) * dispatch.RUNS


@pytest.mark.parametrize(("kernel", "faster"), [(0.98, False), (0.96, True)])
def test_a_kernel_has_to_win_by_more_than_the_clock_can_tell(kernel, faster):
    assert choose(steps=(kernel, 1.0))[1].kernel is faster


def test_one_slow_run_decides_nothing():
    runs = [2.0, 2.0, *[1.0, 2.0] * (dispatch.RUNS - 1), 40.0, 2.0]
    moves = (move * CALLS * 1e-3 for run in runs for move in (0.0, run))
    choice = Dispatch("auto", partial(next, accumulate(moves))).choose(operation(), (mx.ones(3),))
    assert choice.kernel and "1000 us against 2000 us" in choice.reason


def test_a_fault_of_the_gpu_in_a_race_refuses_the_kernel():
    calls = []

    def kernel(x):
        calls.append(x)
        if len(calls) > 3:
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")
        return x + 1

    choice = choose(made=operation(kernel))[1]
    assert choice.reason.startswith("fails in a race: [METAL] Command buffer") and not choice.kernel


def by_way(wrong=""):
    """An operation with two kernels, of which one may be wrong."""
    return operation(lambda x, way: x + 1 + (way == wrong), ways=lambda x: ("one", "two"))


def test_of_several_kernels_the_fastest_that_is_right_is_chosen_by_its_name():
    choice = choose(made=by_way(), steps=(2.0, 1.0, 4.0), sides=3)[1]
    assert (choice.kernel, choice.way) == (True, "two")
    assert choice.reason.startswith("faster: one 2000 us and two 1000 us against 4000 us")
    choice = choose(made=by_way(wrong="two"), steps=(2.0, 4.0))[1]
    assert (choice.kernel, choice.way) == (True, "one")
    choice = choose(made=by_way(), steps=(2.0, 1.0, 0.5), sides=3)[1]
    assert (choice.kernel, choice.way) == (False, "")


def test_a_refusal_is_asked_for_before_a_kernel_runs():
    kernels = Dispatch("auto", refusal=lambda made, args: f"{made.name} hangs")
    made = operation(refused(AssertionError, "it ran"))
    assert kernels.choose(made, (mx.ones(3),)) == Choice(False, "add hangs")


def test_a_table_of_other_kernels_or_another_mlx_is_made_anew(monkeypatch):
    saved = choose()[0].to_json()
    assert len(table_from_json(saved)) == 1
    monkeypatch.setattr(dispatch, "macos", lambda: "BuildVersion: 26A1")
    assert table_from_json(saved) == {}, "nor of another macOS"
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "power_mode", lambda: "lowpowermode 1")
    assert table_from_json(saved) == {}, "nor of another power mode"
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "version", lambda package: "0.99")
    assert table_from_json(saved) == {}


@pytest.mark.parametrize(
    ("says", "mode"),
    [
        ("echo ' SleepDisabled 0'; echo ' lowpowermode         1'", "lowpowermode 1"),
        ("echo ' powermode 2'", "powermode 2"),
        ("echo nothing", ""),
        ("exit 1", ""),
        (None, ""),
    ],
)
def test_the_power_mode_is_what_a_macs_own_program_says(tmp_path, monkeypatch, says, mode):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    if says:
        (tmp_path / "pmset").write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "pmset").chmod(0o755)
    gpu.power_mode.cache_clear()
    assert gpu.power_mode() == mode
    gpu.power_mode.cache_clear()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_kernel_that_metal_refuses_is_not_used_and_says_why(kind):
    """ValueError: MLX's for a threadgroup that needs more registers than there are."""
    words = "[metal::Device] Unable to build metal library from source"
    choice = choose(made=operation(refused(kind, f"{words}\nx:1:2: error: no such type\n  ^")))[1]
    assert choice == Choice(False, "does not run here: x:1:2: error: no such type")


@pytest.mark.parametrize(
    ("mode", "runs_on", "reason"),
    [
        ("on", factory.metal, "kernels are switched on"),
        ("auto", None, "not on Metal, so not raced"),
    ],
)
def test_what_is_not_raced_is_shown_but_not_saved(monkeypatch, mode, runs_on, reason):
    monkeypatch.setattr(dispatch, "executor", lambda: runs_on or (lambda *launched: None))
    kernels, choice = choose(mode, steps=())
    assert choice == Choice(True, reason)
    assert list(kernels.choices.values()) == [choice]
    assert kernels.table == {}


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 96), (96, 96), (97, 128)]
)
def test_sizes_are_rounded_up_to_powers_of_two_and_96(size, rounded):
    assert bucket(size) == rounded


# By operation: the case of a call of its default sizes
CASES = {
    "cascade_attention": "16/8x2x64x64x1024x0/16/float16",
    "draft_head": "8/32000x8/16/float16",
    "cache_commit": "5/8x2x64/16/float16",
    "verify_qmm": "8/1024x256x64x0/4/float16",
    "norm_rope": "8/8x2x128/16/float16",
    "delta_net": "8/2x4x128x4/16/float16+float32",
}


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_an_operation_is_chosen_and_names_its_case(made, monkeypatch):
    monkeypatch.setattr(dispatch, "executor", factory.executor)
    kernels = Dispatch("auto")
    with emulated():
        assert kernels.choose(made, arguments(made, mx.float16)).kernel
    assert list(kernels.choices) == [f"{made.name}/{CASES[made.name]}/{gpu_family()}"]


@pytest.mark.parametrize(("i", "changed"), [(0, 1), (0, 2), (3, 2), (3, 3)])
def test_a_case_does_not_mix_dtypes_that_the_kernel_takes_and_refuses(i, changed):
    made = OPERATIONS[i]
    given = list(arguments(made, mx.float16))
    taken = made.case(*given)
    made.check(*given)
    given[changed] = given[changed].astype(mx.bfloat16)
    with pytest.raises(ValueError, match="dtype"):
        made.check(*given)
    assert made.case(*given) != taken
