"""Kernels are tried in a process of their own, and what came of it is remembered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from kernels_metal import trial, watchdog
from kernels_metal.catalog import OPERATIONS
from kernels_metal.emulator import emulated
from kernels_metal.operation import dtype_name
from kernels_metal.tree_walk import TREE_WALK
from kernels_metal.verify_qmm import VERIFY_QMM
from kernels_metal.watchdog import Watchdog, in_child, read_verdicts
from support.kernels import arguments

CALL = arguments(VERIFY_QMM, mx.float16)


def stored(folder: Path) -> Path:
    (file,) = (folder / "tried").iterdir()
    return file


@pytest.mark.parametrize(("wrong", "refusal"), [("", ""), ("bad", "in a trial process: bad")])
def test_a_variant_is_tried_once_on_a_machine_and_the_verdict_is_remembered(
    tmp_path, wrong, refusal
):
    asked = []

    def run(given: str) -> str:
        asked.append(json.loads(given))
        return wrong

    dog = Watchdog(tmp_path, run)
    wider = arguments(VERIFY_QMM, mx.float16, rows=31, depth=64, columns=9)
    for call in (CALL, wider):  # other sizes, the same variants
        assert dog.refusal(VERIFY_QMM, call) == refusal
    assert Watchdog(tmp_path, run).refusal(VERIFY_QMM, CALL) == refusal
    assert len(asked) == 1
    assert (asked[0]["operation"], asked[0]["dtype"]) == ("verify_qmm", "float16")
    dog.refusal(VERIFY_QMM, arguments(VERIFY_QMM, mx.float16, bits=8))
    dog.refusal(TREE_WALK, arguments(TREE_WALK))
    assert list(read_verdicts(stored(tmp_path))) == [
        "verify_qmm/4/64/float16",
        "verify_qmm/8/64/float16",
        "tree_walk/int32",
    ]


def test_a_try_that_took_the_machine_down_is_a_refusal_next_time(tmp_path):
    def run(given: str) -> str:
        raise KeyboardInterrupt  # what is written by then is all that is left

    with pytest.raises(KeyboardInterrupt):
        Watchdog(tmp_path, run).refusal(VERIFY_QMM, CALL)
    asked: list[str] = []
    refusal = Watchdog(tmp_path, asked.append).refusal(VERIFY_QMM, CALL)  # type: ignore[arg-type]
    assert "never ended" in refusal and not asked


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"safe": 1, "reason": 2}}'])
def test_a_damaged_file_of_verdicts_counts_for_nothing(tmp_path, text):
    Watchdog(tmp_path, lambda given: "bad").refusal(VERIFY_QMM, CALL)
    stored(tmp_path).write_text(text)
    assert Watchdog(tmp_path, lambda given: "").refusal(VERIFY_QMM, CALL) == ""


def test_verdicts_that_cannot_be_kept_hold_for_the_session(tmp_path):
    (tmp_path / "tried").write_text("no folder")
    asked: list[str] = []
    dog = Watchdog(tmp_path, lambda given: asked.append(given) or "bad")
    assert all("bad" in dog.refusal(VERIFY_QMM, CALL) for _ in range(2))
    assert len(asked) == 1


def test_a_verdict_of_other_sources_does_not_hold(tmp_path, monkeypatch):
    Watchdog(tmp_path, lambda given: "bad").refusal(VERIFY_QMM, CALL)
    monkeypatch.setattr(watchdog, "fingerprint", lambda: "other")
    assert Watchdog(tmp_path, lambda given: "").refusal(VERIFY_QMM, CALL) == ""


# The child

SAYS = "import sys; print('a line'); print('differs'); sys.exit({})"
ENDLESS = "while True: pass"


def child(script: str, seconds: float = 20) -> str:
    return in_child("{}", seconds, (sys.executable, "-c", script))


def test_what_a_child_says_last_is_what_is_wrong():
    assert child(SAYS.format(0)) == "differs"
    assert child("") == ""
    assert child(SAYS.format(3)) == "ends the process with 3: differs"


def test_a_child_that_does_not_end_is_ended_and_hangs():
    assert child(ENDLESS, seconds=0.2).startswith("hangs: ")


def test_a_child_that_cannot_be_started_is_a_reason():
    assert "nobody" in in_child("{}", 1, ("/nobody/here",))


def test_the_module_that_a_child_runs_is_found_and_says_what_is_wrong_without_metal():
    """On Linux no kernel can run, so the child ends with the words of the factory."""
    if mx.metal.is_available():
        pytest.skip("there is Metal here")
    given = {"operation": "tree_walk", "dtype": "int32", "sizes": [{}]}
    assert "no Metal and no executor" in in_child(json.dumps(given))


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_every_operation_names_tries_that_run_its_kernels(made):
    _, sizes = made.tried(*arguments(made, mx.float16))
    small = [{**given, "columns": 64} if "columns" in given else given for given in sizes]
    dtype = dtype_name(mx.float16)
    with emulated() as run:
        assert trial.tried(made.name, dtype, small) == ""
    assert {kernel.name for kernel in made.kernels} <= {c.kernel for c in run.counters}


def test_a_try_says_what_is_wrong_with_a_kernel(monkeypatch):
    monkeypatch.setattr(trial, "error", lambda call: 2.0)
    with emulated():
        found = trial.tried("tree_walk", "int32", [{"nodes": 3}])
    assert found == '2.0 times as wrong as rounding explains at {"nodes": 3}'
