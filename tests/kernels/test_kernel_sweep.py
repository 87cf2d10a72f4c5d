"""The random sweep that a Mac's user runs: its trials, its errors, and that it finds a fault."""

from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from kernels_metal.emulator import emulated
from kernels_metal.operations import OPERATIONS
from kernels_metal.sweep import Trial, error, trials


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
            return made.compared(made.reference(*arguments), *arguments)

        def faulty(*arguments, arrays=arrays):
            first, *rest = arrays(*arguments)
            return [first + 1, *rest]

        right = replace(made, kernel=arrays, reference=arrays, compared=lambda found, *args: found)
        assert error(replace(trial, operation=right)) == 0
        assert error(replace(trial, operation=replace(right, kernel=faulty))) > 1


def wrong_ids(head):
    """The first and the last of each row changed places, their log-probabilities did not."""
    order = [head.ids.shape[1] - 1, *range(1, head.ids.shape[1] - 1), 0]
    return replace(head, ids=head.ids[:, mx.array(order)])


def test_wrong_ids_are_an_error_however_right_their_probabilities():
    (made,) = (o for o in OPERATIONS if o.name == "draft_head")
    faults = {
        "in another order": wrong_ids,
        "negative": lambda head: replace(head, ids=head.ids - 1000),
        "behind the last": lambda head: replace(head, ids=head.ids + 1000),
    }
    trial = Trial(made, (mx.random.normal((3, 100), key=mx.random.key(0)), 4), "by hand")
    for name, fault in faults.items():

        def faulty(logits, k, fault=fault):
            return fault(made.reference(logits, k))

        assert error(replace(trial, operation=replace(made, kernel=faulty))) > 1, name
    assert error(replace(trial, operation=replace(made, kernel=made.reference))) == 0


def test_of_equal_logits_any_id_is_right_that_there_is():
    (made,) = (o for o in OPERATIONS if o.name == "draft_head")
    trial = Trial(made, (mx.zeros((2, 9)), 3), "by hand")
    for ids, right in (
        ([0, 1, 2], True),
        ([8, 4, 6], True),
        ([0, 1, 9], False),
        ([-1, 1, 2], False),
    ):

        def chosen(logits, k, ids=ids):
            return replace(made.reference(logits, k), ids=mx.array([ids, ids]))

        assert (error(replace(trial, operation=replace(made, kernel=chosen))) == 0) is right


def test_the_reference_is_computed_on_the_cpu_and_the_kernel_is_not(monkeypatch):
    """On Linux all is on the CPU, so what is looked at is the request."""
    asked, seen = [], {}

    @contextmanager
    def stream(device):
        asked.append(device)
        yield
        asked.pop()

    monkeypatch.setattr(mx, "stream", stream)
    trial = next(trials(0, 1))
    made = trial.operation

    def spy(name):
        def run(*arguments):
            seen[name] = list(asked)
            return made.reference(*arguments)

        return run

    error(replace(trial, operation=replace(made, kernel=spy("kernel"), reference=spy("reference"))))
    assert seen == {"kernel": [], "reference": [mx.cpu]}
