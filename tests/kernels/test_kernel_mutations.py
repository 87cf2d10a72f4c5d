"""Faults put into the real kernels, one at a time: each is found by a check of the emulator, or by
the comparison with the right result. The list is in kernel_faults.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernels_metal.emulator import EmulatorError, emulated
from kernels_metal.factory import SOURCE
from support.kernel_faults import FAULTS, RUNS, Pairs


def outcome(folder: Path | None, run: Callable[[], Pairs]) -> str:
    """The kind of the first fault the emulator finds; "result" or "right" if it finds none."""
    try:
        with emulated(folder):
            pairs = run()
    except EmulatorError as error:
        assert error.line or error.kind == "unwritten", str(error)
        return error.kind
    same = all(np.allclose(ours, wanted, rtol=1e-4, atol=1e-4) for ours, wanted in pairs)
    return "right" if same else "result"


@pytest.mark.parametrize("run", RUNS)
def test_the_kernels_themselves_are_right(run):
    assert outcome(None, run) == "right"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(SOURCE, folder)
    file = folder / f"{fault.file}.metal"
    source = file.read_text()
    assert source.count(fault.before) >= 1, f"{file.name} has changed: adapt this fault"
    file.write_text(source.replace(fault.before, fault.after, 1))
    assert outcome(folder, fault.run) in fault.found.split(" or ")


def test_there_are_faults_in_every_source_file_and_of_every_kind_at_run_time():
    assert len(FAULTS) >= 25
    assert {fault.file for fault in FAULTS} == {path.stem for path in SOURCE.glob("*.metal")}
    kinds = "race, divergence, bounds, uninitialised, unwritten, address space, read-only, lint"
    assert {*kinds.split(", "), "result"} <= {fault.found for fault in FAULTS}
