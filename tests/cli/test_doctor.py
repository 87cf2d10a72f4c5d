"""The doctor: what it says of a machine, and whether a pair fits."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import mlx.core as mx
import pytest
from huggingface_hub import constants

from dflash_mlx import doctor
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import check_named
from dflash_mlx.models.source import Source
from dflash_mlx.system.files import keep_text
from dflash_mlx.system.machine import installed_memory
from dflash_mlx.verifier.pass_times import DEEP_ROWS, ROWS, PassTimes
from kernels_metal.dispatch import Choice, Dispatch
from kernels_metal.draft_head import DRAFT_HEAD
from kernels_metal.watchdog import Watchdog
from support.kernels import arguments
from support.models import edit_config, write_drafter, write_model


def refused(*argv: object) -> None:
    with pytest.raises(SystemExit) as stop:
        doctor.main([*map(str, argv)])
    assert stop.value.code == 2


def test_the_report_names_machine_and_folders_and_shows_stored_calibration(tmp_path):
    lines = doctor.about(tmp_path)
    titles = [line for line in lines if not line.startswith(" ")]
    stored = ["stored timing of passes", "stored kernel choices"]
    found = [title.partition(" (")[0] for title in titles]
    assert found == ["machine", "versions", "backend", *stored] and "--recalibrate" in titles[3]
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
    assert "1 token 50.8 ms, of 8 1.11 x, of 16 1.23 x, of 32 1.48 x, of 64 1.97 x" in text
    assert f"{installed_memory() / 2**30:.0f} GB" in text, "as in the chat"
    assert "after 4096 1.97 x" in text
    day = r"\d{4}-\d\d-\d\d"
    assert re.search(rf"  owner/model  {day}  a pass of 1 token 50.8 ms", text)
    assert re.search(rf"  unknown model  {day}  a pass of 1 token 50.8 ms", text)
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
    (window,) = re.findall(r"memory\n  limit .*\n  window +about ([\d,]+) tokens", out, re.DOTALL)
    assert window == "512", "its context, as it is so small"
    refused("--model", drafter, "--drafter", model)
    out = capsys.readouterr().out
    assert out.startswith("pair\n") and "  cannot be used\nmachine\n" in out
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
    capsys.readouterr()
    refused("--model", "Qwen/Qwen3-4B")
    assert "warning" not in capsys.readouterr().out, "the target is what is missing"


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
