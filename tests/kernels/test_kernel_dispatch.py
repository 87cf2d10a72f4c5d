"""Which of kernel and reference runs, and the reason in the table."""

import json
from functools import partial
from itertools import accumulate

import mlx.core as mx
import pytest

from kernels_metal import dispatch, factory
from kernels_metal.catalog import OPERATIONS
from kernels_metal.dispatch import Choice, Dispatch, table_from_json
from kernels_metal.emulator import emulated
from kernels_metal.operation import Operation, bucket, case_of
from support.kernels import arguments


def operation(kernel=lambda x: x + 1, check=lambda x: None):
    """An operation on one array whose reference adds 1."""
    return Operation(
        name="add",
        kernel=kernel,
        reference=lambda x: x + 1,
        check=check,
        case=lambda x: case_of(x.shape[0], (), [x]),
        kernels=(),
        arguments=lambda draw: (draw.normal(3),),
        defaults={},
    )


def clock(*steps):
    """Moves on by the next of `steps` between every two looks, in all runs of a race."""
    moves = (move for step in steps for _ in range(dispatch.RUNS) for move in (0.0, step))
    return partial(next, accumulate(moves))


@pytest.fixture
def on_metal(monkeypatch):
    """As if MLX ran kernels here."""
    monkeypatch.setattr(dispatch, "executor", lambda: factory.metal)


def choose(mode="auto", steps=(1.0, 2.0), made=None, x=None, table=None):
    kernels = Dispatch(mode, clock=clock(*steps))
    kernels.table.update(table or {})
    x = mx.ones(3) if x is None else x
    return kernels, kernels.choose(operation() if made is None else made, x)


def refused(kind, words):
    def raises(x):
        raise kind(words)

    return raises


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize(("steps", "faster"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_the_faster_side_wins_the_race_and_the_times_are_the_reason(steps, faster):
    words = "faster: 1000000 us against 2000000 us" if faster else "not faster: 2000000 us against"
    choice = choose(steps=steps)[1]
    assert choice.kernel is faster and choice.reason.startswith(words)


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("x", [[1.0, 1.0], [1.0, -float("inf"), float("inf")]])
@pytest.mark.parametrize(("wrong", "used"), [(0.0, True), (0.01, False), (float("nan"), False)])
def test_a_kernel_that_disagrees_is_not_used_however_fast(x, wrong, used):
    """Equal infinities agree, and hide no other difference."""
    choice = choose(x=mx.array(x), made=operation(lambda x: x + 1 + wrong))[1]
    assert choice.kernel is used
    assert choice.reason.startswith("faster: " if used else "differs from the reference by ")


@pytest.mark.usefixtures("on_metal")
def test_integers_must_agree_exactly_and_no_finite_number_is_near_an_infinite_one():
    x = mx.array([1, 2, 100_000_000])
    assert choose(x=x)[1].kernel
    assert not choose(x=x, made=operation(lambda x: x + 2))[1].kernel
    assert dispatch.difference(mx.array([1.0, 2.0]), mx.array([1.0, -mx.inf])) == mx.inf


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("mode", ["auto", "on"])
def test_an_unsupported_case_takes_the_reference_with_the_refusal_as_reason(mode):
    made = operation(check=refused(ValueError, "the head dim is 72"))
    assert choose(mode, made=made)[1] == Choice(False, "the head dim is 72")


@pytest.mark.usefixtures("on_metal")
def test_a_case_is_raced_once_and_the_table_survives_as_json():
    kernels, first = choose()
    assert kernels.choose(operation(), mx.zeros(4)) is first  # as many rows, rounded up
    assert list(kernels.table) == [f"add/4//32/float32/{dispatch.gpu_family()}"]
    saved = table_from_json(json.loads(json.dumps(kernels.to_json())))
    assert choose(steps=(), table=saved)[1] == first
    with pytest.raises(StopIteration):  # this one has to race again, and its clock has no steps
        choose(steps=(), table=saved, x=mx.ones(5))


@pytest.mark.usefixtures("on_metal")
def test_a_table_of_other_kernels_or_another_mlx_is_made_anew(monkeypatch):
    saved = choose()[0].to_json()
    assert len(table_from_json(saved)) == 1
    monkeypatch.setattr(dispatch, "version", lambda package: "0.99")
    assert table_from_json(saved) == {}


@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_kernel_that_metal_refuses_is_not_used_and_says_why(kind):
    """ValueError: MLX's for a threadgroup that needs more registers than there are."""
    words = "[metal::Device] Unable to build metal library from source"
    choice = choose(made=operation(refused(kind, f"{words}\nline 3")))[1]
    assert choice == Choice(False, f"does not run here: {words}")


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
    "tree_walk": "64//32/int32",
    "cache_commit": "8/8x2x64/16/float16",
    "verify_qmm": "8/1024x256x64x0/4/float16",
}


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_an_operation_is_chosen_and_names_its_case(made):
    kernels = Dispatch("auto")
    with emulated():
        assert kernels.choose(made, *arguments(made, mx.float16)).kernel
    assert list(kernels.choices) == [f"{made.name}/{CASES[made.name]}/{dispatch.gpu_family()}"]


@pytest.mark.parametrize(("i", "changed"), [(0, 1), (0, 2), (2, 1), (2, 2), (4, 2), (4, 3)])
def test_a_case_does_not_mix_dtypes_that_the_kernel_takes_and_refuses(i, changed):
    made = OPERATIONS[i]
    given = list(arguments(made, mx.float16))
    taken = made.case(*given)
    made.check(*given)
    given[changed] = given[changed].astype(mx.bfloat16)
    with pytest.raises(ValueError, match="dtype"):
        made.check(*given)
    assert made.case(*given) != taken
