"""The table of operations, and the random sweep over it that a Mac's user runs."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from kernels_metal.catalog import CATALOG, OPERATIONS
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.emulator import emulated
from kernels_metal.factory import SOURCE
from kernels_metal.sweep import Trial, error, trials
from support.kernels import random_calls


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
            assert error(Trial(made, given, "")) <= 1, label
    assert {counters.kernel for counters in run.counters} == {k.name for k in made.kernels}


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
