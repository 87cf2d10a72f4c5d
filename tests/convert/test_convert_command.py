"""The command line of conversions; a destination is complete or absent."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.cli import options as cli
from dflash_mlx.convert import conversion, plan
from dflash_mlx.convert.__main__ import PROGRAM, main
from dflash_mlx.convert.plan import staged
from dflash_mlx.core.errors import DFlashError
from support.converted import config, tensors
from support.models import DAMAGES, write_drafter, write_model


def test_a_conversion_says_where_it_wrote_and_what_mlx_lm_does_meanwhile(tmp_path):
    source, destination = write_model(tmp_path / "model"), tmp_path / "dst"
    command = [sys.executable, "-m", PROGRAM, str(source), str(destination), "--bits", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'dst'}\n")
    assert "bits per weight" in done.stderr  # mlx-lm's own words
    assert config(tmp_path / "dst")["quantization"]["bits"] == 4


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [PROGRAM, str(tmp_path / "nowhere"), str(tmp_path / "dst")])
    with pytest.raises(SystemExit) as stop:
        cli.run(main, PROGRAM)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    (sentence,) = err.splitlines()
    assert sentence.startswith("dflash_mlx.convert: ") and str(tmp_path / "nowhere") in sentence


def test_of_a_family_that_nobody_knows_no_field_is_asked_for(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "banana"}')
    with pytest.raises(DFlashError, match="banana") as refused:
        main([str(tmp_path / "model"), str(tmp_path / "dst")])
    assert "max_position_embeddings" not in str(refused.value)


# A dry run of what is here


def test_a_dry_run_names_the_model_and_what_it_needs_and_reads_no_weights(tmp_path, capsys):
    models = write_model(tmp_path / "model"), write_drafter(tmp_path / "drafter")
    said = []
    for folder in models:
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        main([str(folder), str(tmp_path / "dst"), "--check"])
        largest = max(array.nbytes for array in tensors(folder).values())
        assert mx.get_peak_memory() - active < largest
        model, disk, memory = capsys.readouterr().out.splitlines()
        assert f" in {tmp_path / 'dst'}; " in disk and disk.endswith("free")
        assert memory.startswith("memory    at most about 450.")
        said.append(model)
    assert said[0].startswith(f"target    {models[0]}: llama in float32, ")
    assert said[1].startswith(f"drafter   {models[1]}: DFlashDraftModel in float32, blocks of 8")
    assert not (tmp_path / "dst").exists()


# What is refused


def write(name: str, contents: bytes) -> Callable[[], int]:
    return lambda: Path(name).write_bytes(contents)


def make_gguf_folder() -> None:
    Path("x").mkdir()
    Path("x/m.gguf").write_bytes(b"GGUF")


# The source and the options, what makes it beside a model and a drafter, and what is said
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    **{
        case: ("model", partial(DAMAGES[case][0], Path("model")), DAMAGES[case][1])
        for case in ("damaged weights", "no tokenizer", "code of its own")
    },
    "a pickle": ("x.bin", write("x.bin", b"PK"), "x.bin is not read"),
    "a shard": ("x.safetensors", write("x.safetensors", b"{}"), "x.safetensors is a .* folder"),
    "a GGUF file": ("x.gguf", write("x.gguf", b"GGUF"), "x.gguf .* reads GGUF files as they are"),
    "a text": ("x.txt", write("x.txt", b"GGUF"), "x.txt is a file; give a Hugging Face id"),
    "empty": ("x", lambda: Path("x").mkdir(), "x has no config.json; give a Hugging Face id"),
    "GGUF files": ("x", make_gguf_folder, "no config.json; .* reads GGUF files as they are"),
    **{
        options: (options, lambda: None, value)
        for options, value in (
            ("drafter --bits 3", "bits .* is 3"),
            ("drafter --bits 4 --group-size 64", "rows of 96 .* groups of 64"),
            ("nowhere --bits 7", "7.*choose one of 2, 3, 4, 5, 6, 8"),  # nothing is looked at
            ("nowhere --group-size 32", "group_size is 32"),
            ("nowhere --dtype int8", "'int8'.*float16"),
            ("nowhere.gguf", "no file 'nowhere.gguf"),
            ("a/b/c", "no folder 'a/b/c"),
            ("~nobody-of-this-name/x", "no folder '~nobody-of-this-name/x"),
            ("x" * 300, f"no folder '{'x' * 80}"),
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path, monkeypatch, capsys, case):
    given, make, value = REFUSED[case]
    write_model(tmp_path / "place" / "model")
    write_drafter(tmp_path / "place" / "drafter")
    monkeypatch.chdir(tmp_path / "place")
    make()
    for check in ([], ["--check"]):
        with pytest.raises((DFlashError, SystemExit)) as failure:
            main([given.split()[0], "../dst", *given.split()[1:], *check])
        assert re.search(value, f"{failure.value} {capsys.readouterr().err}")
        assert "\n" not in str(failure.value)
    assert [left.name for left in tmp_path.iterdir()] == ["place"]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """The arguments of a conversion to tmp_path/dst."""
    write_drafter(tmp_path / "drafter")
    return [str(write_model(tmp_path / "model")), str(tmp_path / "dst")]


def nothing_is_left(folder: Path) -> bool:
    return sorted(file.name for file in folder.iterdir()) == ["drafter", "model"]


def fail_at(patch: pytest.MonkeyPatch, stage: str, error: BaseException) -> None:
    """Let what is called at `stage` raise `error`, once it has been called often enough before."""
    module, name, before = STAGES[stage]
    original: Callable[..., Any] = getattr(module, name)
    calls = iter(range(10**6))

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == before:
            raise error
        return original(*arguments, **keywords)

    patch.setattr(module, name, replaced)


# What is called at each stage of a conversion, and how often it may have been before
STAGES: dict[str, tuple[Any, str, int]] = {
    "the folder is made": (plan.Path, "mkdir", 0),
    "the target": (import_module("mlx_lm.convert"), "convert", 0),
    "the target's tokenizer is copied": (conversion.shutil, "copyfile", 0),
    "the drafter's weights": (conversion.mx, "save_safetensors", 0),
    "the files are synced": (plan.os, "fsync", 2),
    "the folder takes its place": (plan.os, "rename", 0),
}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interruption_and_a_full_disk_leave_no_destination(given, tmp_path, monkeypatch, stage):
    if "drafter" in stage:
        given[0] = str(tmp_path / "drafter")
    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (FULL, DFlashError)):
        with monkeypatch.context() as patch:
            fail_at(patch, stage, error)
            said = rf"dst .*\({FULL.strerror}\)" if error is FULL else None
            with pytest.raises(expected, match=said):
                main(given)
        assert nothing_is_left(tmp_path)


def test_an_empty_folder_may_be_the_destination_and_what_was_killed_is_removed(given, tmp_path):
    (tmp_path / "dst").mkdir()
    killed = tmp_path / ".dst.partial" / "model"
    killed.mkdir(parents=True)
    (killed / "left behind").touch()
    main(given)
    left = {file.name for file in (tmp_path / "dst").iterdir()}
    assert "config.json" in left and "left behind" not in left and not killed.exists()


def test_a_conversion_to_where_another_one_writes_is_refused_and_leaves_that_alone(tmp_path):
    destination = tmp_path / "dst"
    others = [tmp_path / ".other.partial", tmp_path / "dst.partial"]
    for other in others:
        other.mkdir()
    with staged(destination) as first:
        first.mkdir()
        (first / "winner").touch()
        with pytest.raises(DFlashError, match="dst is being written"), staged(destination):
            pass
    assert [file.name for file in destination.iterdir()] == ["winner"]
    assert sorted(tmp_path.iterdir()) == sorted([*others, destination])
    assert destination.stat().st_mode == others[0].stat().st_mode


# What is refused before anything is written


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("full", "full .* precious"),
        ("model/config.json", "config.json is a file"),
        ("nowhere/dst", "no folder .*nowhere"),
        ("x" * 300, "xxx.*cannot be DST"),
        ("a\0b", "cannot be DST"),
    ],
)
def test_what_cannot_be_a_destination_is_refused_and_kept(given, tmp_path, name, value):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("data")
    for check in ([], ["--check"]):
        with pytest.raises(DFlashError, match=value) as failure:
            main([given[0], str(tmp_path / name), *check])
        assert "DST" in str(failure.value)
    assert (tmp_path / "full" / "precious").read_text() == "data"
    shutil.rmtree(tmp_path / "full")
    assert nothing_is_left(tmp_path)


def test_a_disk_that_is_too_small_is_refused_with_both_values(given, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=123_456))
    monkeypatch.setattr("dflash_mlx.convert.__main__.convert", None)  # nothing is written
    with pytest.raises(
        DFlashError, match=r"dst, 16.0 MB to spare included, needs 16\.\d MB, .* 123\.5 kB"
    ):
        main(given)
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("part", ["model", "drafter"])
def test_a_source_that_is_cut_off_meanwhile_is_named(given, tmp_path, monkeypatch, part):
    given[0] = str(tmp_path / part)
    file = tmp_path / part / "model.safetensors"
    write_to = conversion.Conversion.write_to

    def cut_first(*arguments):
        os.truncate(file, 20_000)
        write_to(*arguments)

    monkeypatch.setattr(conversion.Conversion, "write_to", cut_first)
    with pytest.raises(DFlashError, match=str(tmp_path / part)):
        main(given)
    assert nothing_is_left(tmp_path)
