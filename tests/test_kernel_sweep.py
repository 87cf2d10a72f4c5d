"""The random sweep that a Mac's user runs: its trials, its errors, and that it finds a fault."""

from dataclasses import replace

from kernels_metal.emulator import emulated
from kernels_metal.operations import OPERATIONS
from kernels_metal.sweep import error, trials


def test_a_seed_names_the_same_trials_of_every_operation():
    once, again = ([t.label for t in trials(3, 2)] for _ in range(2))
    assert once == again != [t.label for t in trials(4, 2)]
    assert [t.operation for t in trials(3, 1)] == list(OPERATIONS)


def test_kernels_stay_within_rounding_in_the_emulator():
    with emulated() as run:
        for trial in trials(5, 1):
            assert error(trial) <= 1, trial.label
    assert len({counters.kernel for counters in run.counters}) == 7


def test_a_fault_is_an_error_above_one():
    for trial in trials(0, 1):
        made = trial.operation

        def arrays(*arguments, made=made):
            return made.compared(made.reference(*arguments))

        def faulty(*arguments, arrays=arrays):
            first, *rest = arrays(*arguments)
            return [first + 1, *rest]

        right = replace(made, kernel=arrays, reference=arrays, compared=list)
        assert error(replace(trial, operation=right)) == 0
        assert error(replace(trial, operation=replace(right, kernel=faulty))) > 1
