"""The conversion's command line: what it says, what it refuses, and what it leaves behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.convert.__main__ import main
from dflash_mlx.convert.conversion import ConvertConfig
from dflash_mlx.core.errors import DFlashError
from support.converted import config, convert, tensors
from support.gguf_files import Q5_0
from support.gguf_files import make_model as make_gguf_model
from support.gguf_files import write as write_gguf
from support.models import DAMAGES, write_drafter, write_model


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_mlx.convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_conversion_says_where_it_wrote_and_what_mlx_lm_does_meanwhile(tmp_path):
    done = run(write_model(tmp_path / "model"), tmp_path / "dst", "--bits", "4")
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'dst'}\n")
    assert "bits per weight" in done.stderr  # mlx-lm's own words
    assert config(tmp_path / "dst")["quantization"]["bits"] == 4


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path):
    done = run(tmp_path / "nowhere", tmp_path / "dst")
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("dflash_mlx.convert: ") and str(tmp_path / "nowhere") in sentence


# A dry run of what is here


def test_a_dry_run_of_a_pair_names_both_and_what_they_need_and_reads_no_weights(tmp_path, capsys):
    model, drafter = write_model(tmp_path / "model"), write_drafter(tmp_path / "drafter")
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    main([str(model), str(tmp_path / "dst"), "--pair", str(drafter), "--bits", "8", "--check"])
    assert mx.get_peak_memory() - active < max(array.nbytes for array in tensors(model).values())
    target, drafts, disk, memory = capsys.readouterr().out.splitlines()
    assert target.startswith(f"target    {model}: llama in 8 bits, ")
    assert drafts.startswith(f"drafter   {drafter}: DFlashDraftModel in float32, blocks of 8")
    assert f" in {tmp_path / 'dst'}; " in disk and disk.endswith("free")
    assert memory.startswith("memory    at most about 450.")
    assert not (tmp_path / "dst").exists()


# What is refused


@pytest.mark.parametrize("case", ["damaged weights", "no tokenizer", "code of its own"])
def test_a_damaged_target_is_refused_with_the_reason(tmp_path, monkeypatch, case):
    damage, message = DAMAGES[case]
    folder = write_model(tmp_path / "model")
    damage(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DFlashError, match=message) as failure:
        main([str(folder), str(tmp_path / "dst")])
    assert "\n" not in str(failure.value)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"architecture": "qwen2"}, "'qwen2', .*'llama'"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "9999"),
        ({"kinds": {"": Q5_0}}, "F32, F16, Q4_0"),
    ],
)
def test_a_gguf_file_that_cannot_be_converted_says_what_can(tmp_path, options, value):
    file = write_gguf(tmp_path / "model.gguf", make_gguf_model(), **options)
    for check in ([], ["--check"]):
        with pytest.raises(DFlashError, match=value):
            main([str(file), str(tmp_path / "dst"), *check])
    assert not (tmp_path / "dst").exists()


def test_a_drafter_for_another_model_makes_no_pair_with_a_gguf_file(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", make_gguf_model())
    drafter = write_drafter(tmp_path / "drafter")
    with pytest.raises(DFlashError, match=r"vocab_size 97, but .*gguf has"):
        main([str(file), str(tmp_path / "dst"), "--pair", str(drafter)])


def directory(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda p: (p / "x.bin").write_bytes(b"PK"), "x.bin is not read"),
        (lambda p: (p / "x.safetensors").write_bytes(b"{}"), "x.safetensors .* its folder"),
        (lambda p: (p / "x.gguf").write_bytes(b"GGML"), "x.gguf .*b'GGML'"),
        (lambda p: (p / "x").mkdir(), "x has no config.json; give a Hugging Face id"),
        (
            lambda p: write_gguf(directory(p / "x") / "m.gguf", make_gguf_model()),
            r"no config.json; .*m\.gguf",
        ),
        (
            lambda p: convert(
                write_model(p.parent / "model"), p / "x", "--pair", write_drafter(p.parent / "d")
            ),
            "x holds a pair",
        ),
    ],
    ids=["a pickle", "a shard", "no GGUF file", "empty", "GGUF files", "a pair"],
)
def test_what_is_no_model_is_refused_with_what_would_be(tmp_path, make, value):
    make(place := directory(tmp_path / "place"))
    (path,) = place.iterdir()
    with pytest.raises(DFlashError, match=value):
        main([str(path), str(tmp_path / "dst")])


@pytest.mark.parametrize("name", ["nowhere.gguf", "a/b/c", "~nobody-of-this-name/x", "x" * 300])
def test_a_name_that_can_be_nothing_is_reported_without_the_network(tmp_path, name):
    with pytest.raises(DFlashError, match=f"no file or folder '{name[:80]}"):
        main([name, str(tmp_path / "dst")])


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ("--bits 7", "7 .*choose from 2, 3, 4, 5, 6, 8"),
        ("--mode gptq", "'gptq' .*affine"),
        ("--recipe mixed_3_6 --bits 4", "recipe mixed_3_6"),
        ("--group-size 32", "group_size is 32"),
        ("--dtype int8", "'int8' .*float16"),
        ("--drafter-bits 6", "6 .*choose from 4, 8"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_looked_at(capsys, options, value):
    with pytest.raises(DFlashError, match="bits is 7; choose one of "):
        ConvertConfig(bits=7)
    with pytest.raises((DFlashError, SystemExit)) as stop:
        main(["nowhere", "dst", *options.split()])
    assert re.search(value, f"{stop.value} {capsys.readouterr().err}")
