"""The doctor: what it says of a machine, of kernels that are right, and of one that is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import mlx.core as mx
import pytest
from huggingface_hub import constants

from dflash_mlx import load
from dflash_mlx.cli import doctor
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import check_named
from dflash_mlx.models.source import Source
from dflash_mlx.system.files import keep_text
from dflash_mlx.verifier.pass_times import DEEP_ROWS, ROWS, PassTimes
from kernels_metal import sweep
from kernels_metal.catalog import OPERATIONS
from kernels_metal.dispatch import Choice, Dispatch
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.emulator import EmulatorError, emulated
from kernels_metal.watchdog import Watchdog
from support.families import make_model
from support.kernels import arguments
from support.models import write_drafter, write_model
from support.recurrent_families import UNSUPPORTED


def no_compiler():
    raise EmulatorError("compile", "no clang", "")


@pytest.fixture
def without_metal(monkeypatch):
    """As on Linux, also where these tests run on a Mac."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


FEW = ("tree_walk", "cache_commit")  # operations that are emulated soon


def only_few(monkeypatch, **changes):
    """Let the sweep run few operations, the first with another kernel or reference."""

    def changed(seed, each):
        for trial in sweep.trials(seed, each):
            if trial.operation.name == FEW[0]:
                yield replace(trial, operation=replace(trial.operation, **changes))
            elif trial.operation.name in FEW:
                yield trial

    monkeypatch.setattr(doctor, "trials", changed)


def test_the_report_names_machine_versions_backend_and_folders(tmp_path):
    lines = doctor.about(tmp_path)
    titles = [line for line in lines if not line.startswith(" ")]
    stored = ["stored calibration", "stored kernel choices"]
    assert titles == ["machine", "versions", "backend", "methods", "cache folders", *stored]
    text = "\n".join(lines)
    for word in ("processor", " GB", f"mlx             {mx.__version__}", "Device(", "blas"):
        assert word in text
    for word in (str(tmp_path), "default model  not fetched yet", "emulator       empty"):
        assert word in text
    assert text.count("none") >= 2


def test_stored_calibration_is_shown_and_a_broken_one_is_named(tmp_path):
    timing = tmp_path / "timing"
    timing.mkdir()
    seconds = [0.05 * (1 + rows / 64) for rows in ROWS]
    deep = PassTimes(DEEP_ROWS, tuple(0.1 for _ in DEEP_ROWS), 4096)
    times = PassTimes(ROWS, tuple(seconds), deeper=(deep,))
    (timing / "good.json").write_text(json.dumps({"model": "owner/model", **asdict(times)}))
    (timing / "older.json").write_text(json.dumps(asdict(times)))
    (timing / "half.json").write_text('{"rows": [1')
    text = "\n".join(doctor.about(tmp_path))
    assert "1 row 50.8 ms, 8 rows 1.11 x, 16 rows 1.23 x, 32 rows 1.48 x, 64 rows 1.97 x" in text
    assert "behind 4096 1.97 x" in text
    day = r"\d{4}-\d\d-\d\d"
    assert re.search(rf"  owner/model  {day}  1 row 50.8 ms", text)
    assert re.search(rf"  unknown model  {day}  1 row 50.8 ms", text)
    assert re.search(rf"  unknown model  {day}  unreadable, will be measured again", text)
    assert "timing         3 files" in text


def test_stored_choices_are_shown_by_model_with_their_reasons(tmp_path):
    made = Dispatch()
    made.table["draft_head/8/32000x4/16/float16/g15s"] = Choice(False, "not faster")
    file = tmp_path / "kernels" / "tiny.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"model": "tiny", **made.to_json()}))
    lines = doctor.about(tmp_path)
    assert lines[-2:] == [
        "  tiny",
        "    stock   not faster  (draft_head/8/32000x4/16/float16/g15s)",
    ]
    call = arguments(DRAFT_HEAD)
    for wrong in ("", "hangs"):
        dog = Watchdog(tmp_path / "kernels", keep_text, lambda given, wrong=wrong: wrong)
        dog.refusal(DRAFT_HEAD, call)
        (tried,) = (tmp_path / "kernels" / "tried").iterdir()
        (line,) = doctor.about(tmp_path)[-1:]
        assert line.startswith("  unsafe  hangs" if wrong else "  safe    ran, and agreed")
        assert line.endswith("  (draft_head/float32)")
        tried.unlink()


def test_without_metal_it_says_so_and_what_was_emulated(without_metal, capsys):
    doctor.main(["--kernels", "--trials", "1", "--seed", "3"])
    out = capsys.readouterr().out
    for words in ("metal   not on this machine", "no kernel ran on a GPU", "Speed is not emulated"):
        assert words in out
    for name in ("cascade_attention", "draft_head", "tree_walk", "cache_commit", "verify_qmm"):
        assert f"  {name} float32: " in out
    assert f"0 of {len(OPERATIONS)} trials wrong in the emulator" in out
    assert "chooses" not in out


@pytest.mark.parametrize(
    ("place", "stands_in", "said"),
    [
        ("dflash_mlx.cli.doctor.find_spec", lambda name: None, [doctor.NO_EMULATOR]),
        ("kernels_metal.emulator.compiler.find_compiler", no_compiler, ["no clang", "ziglang"]),
    ],
    ids=["as in the wheel", "no compiler"],
)
def test_what_cannot_be_emulated_is_said(
    without_metal, monkeypatch, capsys, place, stands_in, said
):
    monkeypatch.setattr(place, stands_in)
    doctor.main(["--kernels"])
    out = capsys.readouterr().out.partition("\nkernels\n")[2]
    assert "not tried" in out and "trials" not in out
    assert [words for words in said if words not in out] == []


def test_a_reference_that_differs_is_reported_and_ends_with_1(without_metal, monkeypatch, capsys):
    made = sweep.OPERATIONS[2]
    only_few(monkeypatch, reference=lambda *a: made.reference(*a) + 1)
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--kernels", "--trials", "1"])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    assert "WRONG inf  tree_walk float32: nodes" in out
    assert "1 of 2 trials wrong in the emulator" in out


def test_a_kernel_that_does_not_run_is_wrong_with_its_reason(without_metal, monkeypatch):
    for fault in (RuntimeError("cannot compile\nat 3"), ValueError("Thread group size (256)")):

        def faulty(*arguments, fault=fault):
            raise fault

        only_few(monkeypatch, kernel=faulty)
        found = list(doctor.check_kernels(False, 0, 1))
        assert [result.right for result in found] == [False, True]
        (line,) = [line for line in doctor.verdict(found, "here") if "WRONG" in line]
        assert line.startswith("  WRONG inf  tree_walk float32: ")
        assert line.endswith(str(fault).partition("\n")[0])


def test_the_choices_are_made_by_dispatch_where_kernels_run(monkeypatch):
    only_few(monkeypatch)
    with emulated():
        found = list(doctor.check_kernels(True, 1, 1))
    assert {result.choice for result in found} == {Choice(True, "not on Metal, so not raced")}


def test_the_worst_trial_of_each_operation_and_all_choices_are_shown():
    trial = next(sweep.trials(0, 1))
    quick, slow = Choice(True, "20 us against 30 us"), Choice(False, "30 us against 20 us")
    better = doctor.Result(trial, 0.5, choice=quick)
    worse = doctor.Result(replace(trial, label="the worse"), 0.75, choice=slow)
    lines = doctor.verdict([better, worse], "on Metal")
    assert "     0.750  the worse" in lines and f"     0.500  {trial.label}" not in lines
    assert f"  kernel  {quick.reason}  ({trial.label})" in lines
    assert f"  stock   {slow.reason}  (the worse)" in lines
    assert lines[-1] == "  0 of 2 trials wrong on Metal"


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5"])
def test_trials_must_be_a_number_from_1_on(count, capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--kernels", f"--trials={count}"])
    assert stop.value.code == 2
    assert f"{count!r} is no number from 1 on" in capsys.readouterr().err


def test_a_pair_that_cannot_be_used_ends_with_2_and_every_next_step(tmp_path, capsys):
    model, drafter = write_model(tmp_path / "model"), write_drafter(tmp_path / "drafter")
    doctor.main(["--model", str(model), "--drafter", str(drafter)])
    assert "  can be used\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--model", str(drafter), "--drafter", str(model)])
    out = capsys.readouterr().out
    assert stop.value.code == 2 and out.endswith("  cannot be used\n")
    for name, option in ((drafter, "--drafter"), (model, "--model")):
        assert re.search(rf"error    {name} is .*\n +give it with {option}", out)


def test_a_drafter_of_the_registry_that_cannot_be_had_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = str(write_model(tmp_path / "Qwen3-4B-4bit"))
    doctor.main(["--model", model])
    out = capsys.readouterr().out
    assert "  drafter  none, so drafts are looked up in the text\n" in out
    assert "  warning  the drafter z-lab/Qwen3-4B-DFlash-b16 cannot be used (" in out
    assert "), so drafts are n-gram lookups\n           name another one with --drafter" in out
    assert "  can be used\n" in out
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--model", model, "--drafter", "z-lab/Qwen3-4B-DFlash-b16"])
    assert stop.value.code == 2


def test_a_drafter_of_the_registry_that_does_not_fit_is_a_warning(tmp_path, monkeypatch):
    wide = write_drafter(tmp_path / "wide", hidden_size=128)
    monkeypatch.setattr("dflash_mlx.models.names.whole_copy", lambda *_: Source.of(wide))
    model = write_model(tmp_path / "Qwen3-4B-4bit")
    report = check_named(PairConfig(str(model)))
    (found,) = [finding for finding in report.findings if finding.severity != "note"]
    assert (found.severity, report.drafters) == ("warning", ())
    assert "made for a target with hidden_size 128, but" in found.what
    (model / "config.json").write_text("{")
    assert [f.severity for f in check_named(PairConfig(str(model))).findings[:1]] == ["error"]


def test_a_pair_of_the_registry_is_said_to_be_unverified_and_its_other_drafters_are_named(
    tmp_path, capsys, monkeypatch
):
    fitting = write_drafter(tmp_path / "drafter")
    monkeypatch.setattr("dflash_mlx.models.names.whole_copy", lambda *_: Source.of(fitting))
    doctor.main(["--model", str(write_model(tmp_path / "Qwen3-4B-4bit"))])
    out = capsys.readouterr().out
    assert "note     z-lab/Qwen3-4B-DFlash-b16 is not verified" in out
    assert "AngelSlim/Qwen3-4B_eagle3 (eagle3)" in out
    assert "deepseek-ai/dspark_qwen3_4b_block7" in out and "  can be used\n" in out
    doctor.main(["--model", str(write_model(tmp_path / "other"))])
    assert "verified" not in capsys.readouterr().out


def test_a_target_whose_state_cannot_be_taken_back_is_refused_as_by_loading(tmp_path):
    settings = UNSUPPORTED["baichuan_m1"]
    write_model(tmp_path, model=make_model("baichuan_m1"), **settings)
    with pytest.raises(DFlashError) as loading:
        load(str(tmp_path))
    (found,) = check_named(PairConfig(str(tmp_path))).errors
    assert found.what == loading.value.what and "gives its recurrent state" in found.what


def test_a_name_of_nothing_is_bad_input():
    with pytest.raises(DFlashError, match="there is no folder '/nowhere/at/all'.*--model"):
        doctor.main(["--model", "/nowhere/at/all"])
