"""The doctor: what it says of a machine, of kernels that are right, and of one that is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from unittest.mock import Mock

import mlx.core as mx
import pytest
from huggingface_hub import constants

from dflash_mlx import doctor
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
from support.kernels import arguments
from support.models import edit_config, write_drafter, write_model


@pytest.fixture
def without_metal(monkeypatch):
    """As on Linux, also where these tests run on a Mac."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


def refused(*argv: object) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main([*map(str, argv)])
    assert stop.value.code == 2


FEW = ("draft_head", "cache_commit")  # operations that are emulated soon


def only_few(monkeypatch, **changes):
    """Let the sweep run few operations, the first with another kernel or reference."""

    def changed(seed, each):
        for trial in sweep.trials(seed, each):
            if trial.operation.name == FEW[0]:
                yield replace(trial, operation=replace(trial.operation, **changes))
            elif trial.operation.name in FEW:
                yield trial

    monkeypatch.setattr(doctor, "trials", changed)


def test_the_report_names_machine_and_folders_and_shows_stored_calibration(tmp_path):
    lines = doctor.about(tmp_path)
    titles = [line for line in lines if not line.startswith(" ")]
    stored = ["stored calibration", "stored kernel choices"]
    assert titles == ["machine", "versions", "backend", *stored]
    text = "\n".join(lines)
    for word in ("processor", " GB", f"mlx             {mx.__version__}", "Device(", "blas"):
        assert word in text
    assert text.count("none") >= 2
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
    assert "after 4096 1.97 x" in text
    day = r"\d{4}-\d\d-\d\d"
    assert re.search(rf"  owner/model  {day}  1 row 50.8 ms", text)
    assert re.search(rf"  unknown model  {day}  1 row 50.8 ms", text)
    assert re.search(rf"  unknown model  {day}  unreadable, will be measured again", text)


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
        assert line.endswith("  (draft_head/16/float32)")
        tried.unlink()


def test_without_metal_it_says_so_and_what_was_emulated(without_metal, capsys):
    doctor.main(["--kernels", "--trials", "1", "--seed", "3"])
    out = capsys.readouterr().out
    for words in ("metal   not on this machine", "no kernel ran on a GPU", "Speed is not emulated"):
        assert words in out
    for name in ("cascade_attention", "draft_head", "cache_commit", "verify_qmm"):
        assert f"  {name} float32: " in out
    assert f"0 of {len(OPERATIONS)} trials wrong in the emulator" in out


@pytest.mark.parametrize(
    ("place", "stands_in", "said"),
    [
        ("dflash_mlx.doctor.find_spec", Mock(return_value=None), [doctor.NO_EMULATOR]),
        (
            "kernels_metal.emulator.compiler.find_compiler",
            Mock(side_effect=EmulatorError("compile", "no clang", "")),
            ["no clang", "ziglang"],
        ),
    ],
    ids=["as in the wheel", "no compiler"],
)
@pytest.mark.usefixtures("without_metal")
def test_what_cannot_be_emulated_is_said(monkeypatch, capsys, place, stands_in, said):
    monkeypatch.setattr(place, stands_in)
    doctor.main(["--kernels"])
    out = capsys.readouterr().out.partition("\nkernels\n")[2]
    assert "not tried" in out and "trials" not in out
    assert [words for words in said if words not in out] == []


def test_a_reference_that_differs_is_reported_and_ends_with_1(without_metal, monkeypatch, capsys):
    (made,) = (each for each in sweep.OPERATIONS if each.name == FEW[0])

    def differs(*given):
        right = made.reference(*given)
        return replace(right, logprobs=right.logprobs + 1)

    only_few(monkeypatch, reference=differs)
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--kernels", "--trials", "1"])
    assert stop.value.code == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "WRONG" in line]
    assert "draft_head float32: rows" in line
    assert "1 of 2 trials wrong in the emulator" in out


@pytest.mark.parametrize(
    "fault", [RuntimeError("cannot compile\na:3: error: x\n ^"), ValueError("Thread group 256")]
)
def test_a_kernel_that_does_not_run_is_wrong_with_its_reason(
    without_metal, monkeypatch, tmp_path, fault
):
    monkeypatch.setattr(doctor.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    only_few(monkeypatch, kernel=Mock(side_effect=fault))
    found = list(doctor.check_kernels(False, 0, 1))
    assert [result.right for result in found] == [False, True]
    (line,) = [line for line in doctor.verdict(found, "here") if "WRONG" in line]
    assert line.startswith("  WRONG inf  draft_head float32: ")
    *_, told = str(fault).splitlines()[:2]
    assert f"  {told}" in line
    if told != str(fault):
        (kept,) = (tmp_path / "dflash-chat" / "kernels" / "faults").iterdir()
        assert str(kept) in line and kept.read_text() == str(fault)


def test_what_a_kernel_is_not_for_is_refused_and_not_wrong(without_metal, monkeypatch):
    never = Mock(side_effect=ValueError("the GPU is one without safe 8x8 matrices"))
    only_few(monkeypatch, check=never, kernel=Mock(side_effect=AssertionError("is not run")))
    found = list(doctor.check_kernels(False, 0, 1))
    assert all(result.right for result in found)
    lines = doctor.verdict(found, "here")
    assert any("refused" in x and "without safe 8x8" in x for x in lines)
    assert lines[-1].startswith("  0 of 2 trials wrong")


def test_of_each_operation_the_worst_trial_is_shown(monkeypatch):
    only_few(monkeypatch)
    with emulated():
        found = list(doctor.check_kernels(True, 1, 1))
    better = doctor.Result(found[0].trial, 0.5)
    worse = doctor.Result(replace(better.trial, label="the worse"), 0.75)
    lines = doctor.verdict([better, worse], "on Metal")
    assert "     0.750  the worse" in lines and f"     0.500  {better.trial.label}" not in lines
    assert lines[-1] == "  0 of 2 trials wrong on Metal"


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5"])
def test_trials_must_be_a_number_from_1_on(count, capsys):
    refused("--kernels", f"--trials={count}")
    assert f"{count!r} is not a whole number of 1 or more" in capsys.readouterr().err


def test_a_pair_that_cannot_be_used_ends_with_2_and_every_next_step(tmp_path, capsys):
    model, drafter = write_model(tmp_path / "model"), write_drafter(tmp_path / "drafter")
    doctor.main(["--model", str(model), "--drafter", str(drafter)])
    out = capsys.readouterr().out
    for words in (
        "llama, 98,816 parameters in float32, context 512",
        "blocks of 8, reads layers 0, 2",
        "  can be used\n",
    ):
        assert words in out
    refused("--model", drafter, "--drafter", model)
    out = capsys.readouterr().out
    assert out.endswith("  cannot be used\n")
    assert re.search(rf"error    {drafter} is .*\n +give it with --drafter", out)
    edit_config(drafter, vocab_size=98)
    refused("--model", model, "--drafter", drafter)
    out = capsys.readouterr().out
    assert f"error    the drafter {drafter} was made for a target with vocab_size 98" in out
    assert "           choose the drafter of this model with --drafter" in out


def test_a_drafter_of_the_registry_that_cannot_be_had_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = str(write_model(tmp_path / "Qwen3-4B-4bit"))
    doctor.main(["--model", model])
    out = capsys.readouterr().out
    assert "  drafter  none, so drafts come from prompt lookup\n" in out
    assert "  warning  the drafter z-lab/Qwen3-4B-DFlash-b16 cannot be used (" in out
    assert "), so drafts come from prompt lookup\n           name another one with --drafter" in out
    assert "  can be used\n" in out
    refused("--model", model, "--drafter", "z-lab/Qwen3-4B-DFlash-b16")


def test_a_drafter_of_the_registry_is_unverified_or_does_not_fit(tmp_path, capsys, monkeypatch):
    drafter = write_drafter(tmp_path / "drafter")
    monkeypatch.setattr("dflash_mlx.models.names.whole_copy", lambda *_: Source.of(drafter))
    model = write_model(tmp_path / "Qwen3-4B-4bit")
    doctor.main(["--model", str(model)])
    out = capsys.readouterr().out
    assert "note     z-lab/Qwen3-4B-DFlash-b16 is not verified" in out
    assert "AngelSlim/Qwen3-4B_eagle3 (eagle3)" in out
    assert "deepseek-ai/dspark_qwen3_4b_block7" in out and "  can be used\n" in out
    edit_config(drafter, hidden_size=128)
    report = check_named(PairConfig(str(model)))
    (found,) = [finding for finding in report.findings if finding.severity != "note"]
    assert (found.severity, report.drafters) == ("warning", ())
    assert "made for a target with hidden_size 128, but" in found.what
    (model / "config.json").write_text("{")
    assert [f.severity for f in check_named(PairConfig(str(model))).findings[:1]] == ["error"]
    doctor.main(["--model", str(write_model(tmp_path / "other"))])
    assert "verified" not in capsys.readouterr().out


def test_a_name_of_nothing_is_bad_input():
    with pytest.raises(DFlashError, match="there is no folder '/nowhere/at/all'.*model="):
        doctor.main(["--model", "/nowhere/at/all"])
