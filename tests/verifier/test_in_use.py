"""Kernels are tried beside the first rounds, watched in their first passes, and turned off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import doctor
from dflash_mlx.verifier import in_use, routing
from dflash_mlx.verifier.routing import Kernels, kernel_choices
from kernels_metal import dispatch, watchdog
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.emulator import Run
from support.hybrids import changed_target
from support.kernels import clock
from support.tries import Tries, emulated_metal

ROWS = 2
SMALL = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def metal() -> Iterator[Run]:
    with emulated_metal() as run:
        yield run


def session(folder: Path, tries: Tries | None = None, *steps: float) -> Kernels:
    """The kernels of a newly loaded model; races are won."""
    steps = steps or (1.0, 2.0) * 4
    made = Kernels("tiny", lambda: [("weight", mx.zeros(3))], folder, clock(*steps))
    made.trials = tries or Tries()
    made.switch("auto")
    return made


def taken(kernels: Kernels, rows: int = ROWS) -> bool:
    return kernels.run(DRAFT_HEAD, mx.arange(rows * 9.0).reshape(rows, 9), 3) is not None


def settled(folder: Path, tries: Tries | None = None) -> Kernels:
    """Kernels whose one operation was tried, raced and taken."""
    kernels = session(folder, tries)
    taken(kernels)
    kernels.wait()
    assert kernels.begin_round() and taken(kernels)
    return kernels


def marks(folder: Path) -> list[Path]:
    return [*(folder / "in-use").glob("*")]


# Tried beside the first rounds


def test_decoding_begins_with_stock_and_what_was_tried_holds_from_the_next_round_on(tmp_path):
    tries = Tries()
    kernels = session(tmp_path, tries)
    assert kernels.begin_round()
    held = kernels.running()
    assert not taken(kernels)
    (choice,) = kernels.choices.values()
    assert choice.reason == watchdog.TRYING
    kernels._watchdog.wait(20)
    assert kernels.running() is held  # in this round nothing changes
    kernels.begin_round()
    assert kernels.running() is not held
    assert taken(kernels) and tries.asked == 1
    (choice,) = kernels.choices.values()
    assert choice.kernel and "faster" in choice.reason
    again = kernels.running()
    kernels.begin_round()
    assert kernels.running() is again


def test_what_failed_its_try_stays_with_stock_and_is_not_tried_again(tmp_path):
    kernels = session(tmp_path, Tries("hangs"))
    taken(kernels)
    kernels.wait()
    assert not taken(kernels) and not kernels.is_watched
    tries = Tries()
    assert not taken(session(tmp_path, tries)) and tries.asked == 0


def test_a_program_that_ends_leaves_no_verdict_of_what_it_was_trying(tmp_path):
    """Its try is ended with it, which is no fault of the kernel."""
    child = "import sys; sys.stdin.readline(); sys.stdin.readline()"
    trials = watchdog.Trials((sys.executable, "-c", child), seconds=60)
    kernels = session(tmp_path)
    kernels.trials = trials
    taken(kernels)
    again = mx.arange(ROWS * 9.0, dtype=mx.float16).reshape(ROWS, 9)
    assert kernels.run(DRAFT_HEAD, again, 3) is None  # and another try waits behind the first
    dog = kernels._watchdog
    while trials._children._child is None:
        dog.wait(0.01)
    dog._end(trials)
    assert not dog.is_trying()
    assert routing.trial_verdicts(tmp_path) == {}


def test_a_process_that_tries_is_started_for_auto_on_metal_alone(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(routing, "Trials", lambda wanted: made.append(wanted) or "tries")
    monkeypatch.setattr(routing, "default_folder", lambda: tmp_path)
    assert routing.begin_trials("auto") == "tries" and made == [True]
    file = watchdog.file_of(tmp_path)
    file.parent.mkdir()
    file.write_text("{}")
    assert routing.begin_trials("auto") == "tries" and made.pop() is False
    assert routing.begin_trials("on") is None and routing.begin_trials("off") is None
    monkeypatch.setattr(routing, "executor", lambda: None)
    assert routing.begin_trials("auto") is None and len(made) == 1


def test_a_model_that_is_switched_on_asks_for_all_that_a_pass_asks_for(tmp_path):
    target = changed_target("qwen3", 4, **SMALL, num_hidden_layers=1)
    target.kernels = Kernels("tiny", target.parameters, tmp_path)
    target.kernels.trials = tries = Tries("hangs")
    target.use_kernels("auto")
    target.kernels.wait()
    tried = {key.partition("/")[0] for key in routing.trial_verdicts(tmp_path)}
    assert tried >= {"verify_qmm", "cascade_attention"} and tries.asked == len(
        routing.trial_verdicts(tmp_path)
    )


# Watched in their first passes


def test_a_new_kernel_is_marked_until_some_passes_went_well(tmp_path):
    kernels = settled(tmp_path)
    (mark,) = marks(tmp_path)
    assert str(os.getpid()) in mark.name and kernels.is_watched
    assert json.loads(mark.read_text()) == [*kernels.choices]
    assert not kernels.end_round(ROWS, 99.0, None)  # the pass with the race counts for nothing
    for _ in range(in_use.PASSES):
        assert mark.exists()
        assert not kernels.end_round(ROWS, 0.1, None)
    assert not mark.exists() and not kernels.is_watched
    assert kernels.end_round(ROWS, 0.1, None) and taken(kernels)
    assert taken(session(tmp_path)) and not marks(tmp_path)  # it is not new to the next start


def test_what_a_dead_process_had_in_use_is_off_for_the_next_start_and_the_doctor_says_so(tmp_path):
    folder = tmp_path / "kernels"
    settled(folder)
    (mark,) = marks(folder)
    assert taken(session(folder))  # that process lives
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mark.rename(mark.with_name(mark.name.replace(str(os.getpid()), str(dead.pid))))
    assert not taken(session(folder))
    assert not marks(folder)
    assert not taken(session(folder))  # nor after it
    (line,) = [line for line in doctor.about(tmp_path) if "turned off" in line]
    assert "in use when its program ended" in line and "draft_head/2" in line


def test_a_kernel_is_marked_before_it_races_and_no_longer_where_it_loses(tmp_path):
    kernels = session(tmp_path, None, 2.0, 1.0)
    taken(kernels)
    kernels.wait()
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_disagreement", lambda *given: seen.append(len(marks(tmp_path))))
        patch.setattr(dispatch, "race", lambda *given: {"": 2.0, "stock": 1.0})
        assert not taken(kernels)
    assert seen == [1] and not marks(tmp_path) and not kernels.is_watched


def test_a_draft_model_whose_passes_nobody_watches_leaves_no_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.Trials, "__call__", lambda self, given: "")
    kernels = session(tmp_path)
    kernels.trials = None
    assert taken(kernels) and not marks(tmp_path)


@pytest.mark.parametrize(("end", "left"), [("sys.exit(1)", 0), ("os._exit(1)", 1)])
def test_a_program_that_ends_by_itself_takes_its_mark_along(tmp_path, end, left):
    script = "import os, sys, pathlib; from dflash_mlx.verifier.in_use import InUse"
    file = str(tmp_path / "model.json")
    script += f"; InUse(pathlib.Path({file!r})).begin('a case'); {end}"
    subprocess.run([sys.executable, "-c", script], check=False)
    assert len(marks(tmp_path)) == left == len([*in_use.left_behind(Path(file))])


@pytest.mark.parametrize("text", ["", "[1]", "{}", "null"])
def test_a_damaged_mark_turns_nothing_off(tmp_path, text):
    settled(tmp_path)
    (mark,) = marks(tmp_path)
    mark.rename(mark.with_name(mark.name.replace(str(os.getpid()), "4194304")))
    for file in marks(tmp_path):
        file.write_text(text)
    assert taken(session(tmp_path))


@pytest.mark.parametrize(
    ("usual", "seconds", "expected", "slow"),
    [
        (None, 6.0, 0.2, True),
        (0.2, 6.0, None, True),
        (0.2, 4.9, None, False),  # not long
        (0.5, 6.0, None, False),  # not many times as long
        (None, 6.0, None, False),  # nobody knows
    ],
)
def test_a_pass_that_takes_far_too_long_turns_off_what_is_new(
    tmp_path, usual, seconds, expected, slow
):
    kernels = settled(tmp_path)
    kernels.end_round(ROWS, 0.0, None)
    if usual:
        kernels.end_round(ROWS, usual, None)
    kernels.end_round(ROWS, seconds, expected)
    assert taken(kernels) != slow
    assert taken(session(tmp_path)) != slow
    (choice,) = [*kernel_choices(tmp_path).values()][0].values()
    assert ("took 6.0 s" in choice.reason) == slow


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_the_memory_of_it(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    kernels = settled(folder)
    kernels.fail(RuntimeError("gpu"))
    assert not taken(kernels)
