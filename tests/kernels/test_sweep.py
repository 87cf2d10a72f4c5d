"""The sweep of all kernels: what it says of those that are right, and of one that is wrong."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import mlx.core as mx
import pytest

from kernels_metal import sweep
from kernels_metal.catalog import OPERATIONS
from kernels_metal.emulator import EmulatorError, emulated


@pytest.fixture
def without_metal(monkeypatch):
    """As on Linux, also where these tests run on a Mac."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


FEW = ("draft_head", "cache_commit")  # operations that are emulated soon


def only_few(monkeypatch, **changes):
    """Let the sweep run few operations, the first with another kernel or reference."""

    every = sweep.trials

    def changed(seed, each):
        for trial in every(seed, each):
            if trial.operation.name == FEW[0]:
                yield replace(trial, operation=replace(trial.operation, **changes))
            elif trial.operation.name in FEW:
                yield trial

    monkeypatch.setattr(sweep, "trials", changed)


def test_without_metal_it_says_so_and_what_was_emulated(without_metal, capsys):
    sweep.main(["--trials", "1", "--seed", "3"])
    out = capsys.readouterr().out
    for words in ("no Metal on this machine", "no kernel ran on a GPU", "Speed is not emulated"):
        assert words in out
    for name in ("cascade_attention", "draft_head", "cache_commit", "verify_qmm"):
        assert f" {name} float32: " in out
    assert f"0 of {len(OPERATIONS)} trials wrong in the emulator" in out


@pytest.mark.parametrize(
    ("place", "stands_in", "said"),
    [
        ("kernels_metal.sweep.find_spec", Mock(return_value=None), [sweep.NO_EMULATOR]),
        (
            "kernels_metal.emulator.compiler.find_compiler",
            Mock(side_effect=EmulatorError("compile", "no clang", "")),
            ["no clang"],
        ),
    ],
    ids=["as in the wheel", "no compiler"],
)
@pytest.mark.usefixtures("without_metal")
def test_what_cannot_be_emulated_is_said(monkeypatch, capsys, place, stands_in, said):
    monkeypatch.setattr(place, stands_in)
    assert sweep.main([]) == 0
    out = capsys.readouterr().out
    assert "not tried" in out and "trials" not in out
    assert [words for words in said if words not in out] == []


def test_a_reference_that_differs_is_reported_and_ends_with_1(without_metal, monkeypatch, capsys):
    (made,) = (each for each in sweep.OPERATIONS if each.name == FEW[0])

    def differs(*given):
        right = made.reference(*given)
        return replace(right, logprobs=right.logprobs + 1)

    only_few(monkeypatch, reference=differs)
    assert sweep.main(["--trials", "1"]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "WRONG" in line]
    assert "draft_head float32: rows" in line
    assert "1 of 2 trials wrong in the emulator" in out


@pytest.mark.parametrize(
    "fault", [RuntimeError("cannot compile\na:3: error: x\n ^"), ValueError("Thread group 256")]
)
def test_a_kernel_that_does_not_run_is_wrong_with_its_reason(
    without_metal, monkeypatch, capsys, fault
):
    only_few(monkeypatch, kernel=Mock(side_effect=fault))
    found = list(sweep.check_kernels(False, 0, 1))
    assert [result.right for result in found] == [False, True]
    (line,) = [line for line in sweep.verdict(found, "here") if "WRONG" in line]
    assert line.startswith("WRONG inf  draft_head float32: ")
    *_, told = str(fault).splitlines()[:2]
    assert f"  {told}" in line
    assert str(fault) in capsys.readouterr().err


def test_what_a_kernel_is_not_for_is_refused_and_not_wrong(without_metal, monkeypatch):
    never = Mock(side_effect=ValueError("the GPU is one without safe 8x8 matrices"))
    only_few(monkeypatch, check=never, kernel=Mock(side_effect=AssertionError("is not run")))
    found = list(sweep.check_kernels(False, 0, 1))
    assert all(result.right for result in found)
    lines = sweep.verdict(found, "here")
    assert any("refused" in x and "without safe 8x8" in x for x in lines)
    assert lines[-1].startswith("0 of 2 trials wrong")


def test_of_each_operation_the_worst_trial_is_shown(monkeypatch):
    only_few(monkeypatch)
    with emulated():
        found = list(sweep.check_kernels(True, 1, 1))
    better = sweep.Result(found[0].trial, 0.5)
    worse = sweep.Result(replace(better.trial, label="the worse"), 0.75)
    lines = sweep.verdict([better, worse], "on Metal")
    assert "   0.750  the worse" in lines and f"   0.500  {better.trial.label}" not in lines
    assert lines[-1] == "0 of 2 trials wrong on Metal"


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5"])
def test_trials_must_be_a_number_from_1_on(count, capsys):
    with pytest.raises(SystemExit) as stop:
        sweep.main([f"--trials={count}"])
    assert stop.value.code == 2
    assert f"{count!r} is not a whole number of 1 or more" in capsys.readouterr().err
