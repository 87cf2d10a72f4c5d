"""Kernels are tried in a process of their own, and what came of it is remembered."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.system.files import keep_text
from kernels_metal import children, trial, watchdog
from kernels_metal.cascade_attention import CASCADE_ATTENTION, HEAD_DIMS
from kernels_metal.catalog import OPERATIONS
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.emulator import emulated
from kernels_metal.operation import Operation, dtype_name
from kernels_metal.verify_qmm import GROUPS, VERIFY_QMM
from kernels_metal.watchdog import Trials, Watchdog, read_verdicts
from support.kernels import arguments, recorded

CALL = arguments(VERIFY_QMM, mx.float16)
HEAD_CALL = arguments(DRAFT_HEAD, mx.float16)


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

    dog = Watchdog(tmp_path, keep_text, run)
    wider = arguments(VERIFY_QMM, mx.float16, rows=31, depth=64, columns=9)
    for call in (CALL, wider):  # other sizes, the same variants
        assert dog.refusal(VERIFY_QMM, call) == refusal
    assert Watchdog(tmp_path, keep_text, run).refusal(VERIFY_QMM, CALL) == refusal
    assert len(asked) == 1
    assert (asked[0]["operation"], asked[0]["dtype"]) == ("verify_qmm", "float16")
    dog.refusal(VERIFY_QMM, arguments(VERIFY_QMM, mx.float16, bits=8))
    dog.refusal(DRAFT_HEAD, HEAD_CALL)
    assert list(read_verdicts(stored(tmp_path))) == [
        "verify_qmm/4/64/float16",
        "verify_qmm/8/64/float16",
        "draft_head/16/float16",
    ]


def test_a_try_that_never_ended_is_made_once_more_and_no_third_time(tmp_path):
    left = []

    def run(given: str) -> str:
        left.append(stored(tmp_path).read_text())  # all that is there if nothing follows
        return ""

    assert Watchdog(tmp_path, keep_text, run).refusal(VERIFY_QMM, CALL) == ""
    stored(tmp_path).write_text(left[0])
    assert Watchdog(tmp_path, keep_text, run).refusal(VERIFY_QMM, CALL) == "", "once more"
    stored(tmp_path).write_text(left[1])
    refusal = Watchdog(tmp_path, keep_text, run).refusal(VERIFY_QMM, CALL)
    assert "never ended" in refusal and str(stored(tmp_path)) in refusal and len(left) == 2


def test_a_try_that_was_interrupted_counts_for_nothing(tmp_path):
    def run(given: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Watchdog(tmp_path, keep_text, run).refusal(VERIFY_QMM, CALL)
    assert read_verdicts(stored(tmp_path)) == {}
    assert Watchdog(tmp_path, keep_text, lambda given: "").refusal(VERIFY_QMM, CALL) == ""


def test_what_two_programs_find_out_at_once_is_kept_of_both(tmp_path):
    def first(given: str) -> str:
        other = Watchdog(tmp_path, keep_text, lambda given: "bad")
        other.refusal(DRAFT_HEAD, HEAD_CALL)
        return ""

    Watchdog(tmp_path, keep_text, first).refusal(VERIFY_QMM, CALL)
    found = read_verdicts(stored(tmp_path))
    assert {key: verdict.safe for key, verdict in found.items()} == {
        "verify_qmm/4/64/float16": True,
        "draft_head/16/float16": False,
    }


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"safe": 1, "reason": 2}}', None])
def test_a_damaged_file_and_verdicts_of_other_sources_count_for_nothing(
    tmp_path, monkeypatch, text
):
    Watchdog(tmp_path, keep_text, lambda given: "bad").refusal(VERIFY_QMM, CALL)
    if text is None:
        monkeypatch.setattr(watchdog, "fingerprint", lambda: "other")
    else:
        stored(tmp_path).write_text(text)
    assert Watchdog(tmp_path, keep_text, lambda given: "").refusal(VERIFY_QMM, CALL) == ""


def test_verdicts_that_cannot_be_kept_hold_for_the_session(tmp_path):
    (tmp_path / "tried").write_text("no folder")
    asked: list[str] = []
    dog = Watchdog(tmp_path, keep_text, lambda given: asked.append(given) or "bad")
    assert all("bad" in dog.refusal(VERIFY_QMM, CALL) for _ in range(2))
    assert len(asked) == 1


# The child

SAYS = "import sys; print({!r}); print({!r}, file=sys.stderr); sys.exit({})"
ENDLESS = "while True: pass"
COMPILER = """RuntimeError: [metal::Device] Unable to build metal library from source
program_source:12:5: error: cannot initialize a variable of type 'bfloat'
    bfloat y = x;
           ^   ~
1 error generated."""


def child(script: str, seconds: float = 20) -> str:
    return Trials((sys.executable, "-c", script), seconds)("{}")


def outcome(what: str) -> str:
    return children.OUTCOME + json.dumps(what)


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        (SAYS.format(f"noise\n{outcome('differs')}\nmore noise", "noise", 0), "differs"),
        (SAYS.format(outcome(""), "Validation is enabled", 0), ""),
        (SAYS.format(f"outcome: none of ours\n{outcome('differs')}", "", 0), "differs"),
        (
            "import os; from kernels_metal.children import answer; "
            "answer(lambda given: os.write(1, b'noise') and 'differs', lambda given: 9)",
            "differs",
        ),
        (SAYS.format("", "a\nb", 3), "ends the process with 3: a\nb"),
        (SAYS.format("noise", "", 0), "ended without an outcome\nnoise"),
        (r"import os; os.write(1, b'\xff')", "ended without an outcome\n\ufffd"),
        # The interrupt of a terminal does not reach it
        (
            "import os; assert os.getpgrp() == os.getpid(); " + SAYS.format(outcome("ok"), "", 0),
            "ok",
        ),
    ],
)
def test_what_a_child_marks_is_its_outcome_and_noise_is_none(script, wrong):
    assert child(script) == wrong


def test_of_a_compilers_words_the_first_error_is_told_and_all_is_in_the_file_named(tmp_path):
    dog = Watchdog(tmp_path, keep_text, lambda given: f"ends the process with 1: {COMPILER}")
    refusal = dog.refusal(VERIFY_QMM, CALL)
    (file,) = (tmp_path / "faults").iterdir()
    told = "in a trial process: program_source:12:5: error: cannot initialize a variable"
    assert refusal.startswith(told) and str(file) in refusal
    assert file.read_text().endswith(COMPILER)
    assert Watchdog(tmp_path, keep_text, lambda given: "").refusal(VERIFY_QMM, CALL) == refusal


def test_without_a_place_to_keep_them_the_words_are_told_without_a_file(tmp_path):
    (tmp_path / "faults").write_text("no folder")
    refusal = Watchdog(tmp_path, keep_text, lambda given: COMPILER).refusal(VERIFY_QMM, CALL)
    assert refusal.endswith("a variable of type 'bfloat'")


def test_a_child_that_does_not_end_is_ended_and_hangs(tmp_path):
    file = tmp_path / "process"
    script = f"import os; open({str(file)!r}, 'w').write(str(os.getpid())); {{}}"
    assert child(script.format("\n" + ENDLESS), seconds=3).startswith("hangs: ")
    flood = "\nwhile True: os.write(1, b'noise')"
    assert child(script.format(flood), seconds=1).startswith("hangs: ")
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_a_child_that_cannot_be_started_is_a_reason():
    assert "nobody" in Trials(("/nobody/here",), 1)("{}")


def test_the_module_that_a_child_runs_is_found_and_says_what_is_wrong_without_metal():
    """On Linux no kernel can run, so the child ends with the words of the factory."""
    if mx.metal.is_available():
        pytest.skip("there is Metal here")
    given = {"operation": "draft_head", "dtype": "float16", "sizes": [{}]}
    assert "no Metal and no executor" in Trials()(json.dumps(given))


@pytest.mark.parametrize("made", OPERATIONS, ids=lambda made: made.name)
def test_every_operation_names_tries_that_run_its_kernels(made):
    _, sizes = made.tried(*arguments(made, mx.float16))
    small = [{**given, "columns": 64} if "columns" in given else given for given in sizes]
    dtype = dtype_name(mx.float16)
    with emulated() as run:
        assert trial.tried(made.name, dtype, small) == ""
    assert {kernel.name for kernel in made.kernels} <= {c.kernel for c in run.counters}


def variants(made: Operation, sizes: list[dict[str, int]]) -> set[Any]:
    """The kernels that calls of these sizes launch, with their templates."""
    with recorded() as samples:
        for given in sizes:
            call = arguments(made, mx.float16, **given)
            for way in made.ways(*call):
                made.by(way)(*call)
    return {(kernel.name, plan.template) for kernel, _, plan in samples}


@pytest.mark.parametrize(
    ("made", "same", "others"),
    [
        *((VERIFY_QMM, {"bits": 4, "group": g}, {"depth": 128}) for g in GROUPS),
        (VERIFY_QMM, {"bits": 4, "group": 64, "gated": 1}, {"depth": 128}),
        *((CASCADE_ATTENTION, {"dim": dim}, {"heads": 8, "kv_heads": 2}) for dim in HEAD_DIMS),
    ],
)
def test_no_variant_of_a_kernel_runs_untried(made, same, others):
    _, sizes = made.tried(*arguments(made, mx.float16, **same))
    if made is VERIFY_QMM:
        more = [{"columns": columns} for columns in (64, 20_000)]
    else:
        more = [{"prefix": prefix} for prefix in (1, 60, 500)]
    rows = (1, 8, 9, 16, 17, 24, 25, 32)
    calls = [{**same, **others, **each, "rows": count} for each in more for count in rows]
    assert variants(made, calls) <= variants(made, sizes)


def test_what_this_gpu_has_no_registers_for_is_not_called_right(monkeypatch):
    def refused(call: object) -> float:
        raise ValueError("Thread group size (512) is greater than the maximum")

    monkeypatch.setattr(trial, "error", refused)
    found = trial.tried("draft_head", "float16", [{"rows": 1}])
    assert found.startswith("none of its variants fits this GPU: Thread group size (512)")
    found = iter([refused, lambda call: 0.5])
    monkeypatch.setattr(trial, "error", lambda call: next(found)(call))
    assert trial.tried("draft_head", "float16", [{"rows": 1}, {"rows": 2}]) == ""


def test_a_try_says_what_is_wrong_with_a_kernel(monkeypatch):
    monkeypatch.setattr(trial, "error", lambda call: 2.0)
    with emulated():
        found = trial.tried("draft_head", "float16", [{"rows": 1}])
    assert found == '2.0 times as wrong as rounding explains at {"rows": 1}'
