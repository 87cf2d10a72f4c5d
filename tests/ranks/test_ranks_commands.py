"""Commands on several ranks: the same answers, refusals by name, and one end for all."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from select import select
from urllib.request import Request, urlopen

import pytest

from dflash_mlx import ranks
from dflash_mlx.cli import disk, generate
from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.downloads import check_memory, needed_by
from dflash_mlx.models.names import find_names
from support.models import EOS, edit_config, write_endless_model, write_model
from support.ranks import ROOT, ended, free_ports, kill, launched, on_ranks, started
from support.ranks_answers import everything, pair_of
from support.ranks_families import CASES

GENERATE = ["-m", "dflash_mlx.generate", "--method", "none", "--prompt", "hello"]
PAGE = (ROOT / "docs" / "two-machines.md").read_text(encoding="utf-8").replace("\\\n", " ")
SOON = 30  # seconds in which a rank has to end when another has


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words that work for long."""
    folder = write_endless_model(tmp_path_factory.mktemp("endless") / "model")
    return [*GENERATE, "--model", str(folder), "--max-tokens", "90000"]


def test_two_ranks_say_what_one_says(tmp_path, model):
    out = tmp_path / "found.json"
    words = ["-m", "support.ranks_answers", str(model), str(tmp_path / "drafters"), str(out)]
    said = on_ranks(tmp_path, 2, *words)
    assert [(each.code, each.out, each.sentences) for each in said] == [(0, "", [])] * 2
    found = json.loads(out.read_text())
    expected = json.loads(json.dumps(everything(pair_of(model, tmp_path / "alone"))))
    assert found == expected
    assert found["reused"] > 0 and len(found["several"]) == 5


def test_only_the_first_rank_prints_an_answer(tmp_path, model, capsys):
    words = [*GENERATE, "--model", str(model), "--max-tokens", "8", "--json"]
    first, second = on_ranks(tmp_path, 2, *words)
    generate.main(words[2:])
    assert (first.code, second.code, second.out, second.error) == (0, 0, "", "")
    assert json.loads(first.out)["tokens"] == json.loads(capsys.readouterr().out)["tokens"]


def test_parts_of_many_families_say_what_whole_models_say(tmp_path):
    out = tmp_path / "far.json"
    said = on_ranks(tmp_path, 2, "-m", "support.ranks_families", str(out))
    assert [(each.code, each.out) for each in said] == [(0, "")] * 2, said
    far = json.loads(out.read_text())
    assert [*far] == [*CASES] and max(far.values()) < 1e-4, far


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["-m", "dflash_mlx.convert", "a", "b"], "dflash_mlx.convert takes one process", 2),
        (["-m", "dflash_mlx.train"], "dflash_mlx.train takes one process", 2),
        ([*GENERATE[:-1], "-"], "standard input takes one process", 0),
    ],
)
def test_what_takes_one_process_is_refused_by_name(tmp_path, words, said, code):
    first, second = on_ranks(tmp_path, 2, *words)
    assert first.code == 2 and said in first.error and len(first.sentences) == 1
    assert (second.code, second.out, second.error) == (code, "", "")


@pytest.mark.parametrize(
    ("ranks", "changes", "said"),
    [
        (3, {}, ["num_attention_heads 4", "num_key_value_heads 2", "start 2 ranks"]),
        (2, {"model_type": "gemma"}, ["gemma", "does not split"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(tmp_path, ranks, changes, said):
    folder = write_model(tmp_path / "model")
    edit_config(folder, **changes)
    first, *others = on_ranks(tmp_path, ranks, *GENERATE, "--model", str(folder))
    assert first.code == 2 and len(first.sentences) == 1
    assert all(part in first.error for part in said)
    assert [(each.code, each.out, each.error) for each in others] == [(0, "", "")] * (ranks - 1)


OTHER_VERSION = """
import runpy, sys
from dflash_mlx.system import machine
versions = machine.describe_versions()
machine.describe_versions = lambda: {**versions, "mlx": "0.0.1"}
runpy.run_module("dflash_mlx.generate", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("model", "rank 1 of 2 differs: config.json is"),
        ("version", "rank 1 of 2 differs: mlx is 0.0.1 there"),
        ("nothing", "rank 1 of 2: model was not found"),
    ],
)
def test_a_rank_with_another_model_or_version_or_without_ends_all(tmp_path, model, what, said):
    places = [model.parent, tmp_path / "other"]
    places[1].mkdir()
    if what != "nothing":
        write_model(places[1] / "model", eos_token_id=5 if what == "model" else EOS)
    words = [[*GENERATE, "--model", "model"]] * 2
    if what == "version":
        words = [words[0], ["-c", OTHER_VERSION, *words[1][2:]]]
    with started(tmp_path, words, places=places) as running:
        first, second = ended(running)
    (sentence,) = first.sentences
    assert first.code == 2 and said in sentence
    assert (second.code, second.error) == (2, "")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_with_a_sentence(tmp_path, endless, victim):
    with started(tmp_path, [endless] * 2) as running:
        assert running[0].stdout.read(1), "it answers"
        running[victim].kill()
        (said,) = ended([running[1 - victim]], SOON)
    (sentence,) = said.sentences
    assert said.code == 1 and "another rank has ended" in sentence


def test_a_rank_that_waits_for_one_that_hangs_ends_by_sigterm(tmp_path, endless):
    with started(tmp_path, [endless] * 2) as running:
        assert running[0].stdout.read(1), "it answers"
        running[1].send_signal(signal.SIGSTOP)
        while select([running[0].stdout], [], [], 1)[0]:
            assert os.read(running[0].stdout.fileno(), 9999), "it waits"
        running[0].terminate()
        assert ended(running[:1], SOON)[0].code == -signal.SIGTERM


def test_ctrl_c_ends_all(tmp_path, endless):
    with started(tmp_path, [endless] * 2) as running:
        assert running[0].stdout.read(1), "it answers"
        for each in running:
            each.send_signal(signal.SIGINT)
        said = ended(running, SOON)
    assert [each.code for each in said] == [130, 0]
    assert said[1].error == ""


def test_help_ends_all_without_a_word_of_the_others(tmp_path):
    first, second = on_ranks(tmp_path, 2, "-m", "dflash_mlx.generate", "--help")
    assert (first.code, second.code) == (0, 0) and "--prompt" in first.out
    assert first.error == second.error == second.out == ""


def test_a_server_ends_where_a_rank_is_killed_during_an_answer(tmp_path, endless):
    port = free_ports(1)[0]
    model = endless[endless.index("--model") + 1]
    words = ["-m", "dflash_mlx.serve", "--model", model, "--method", "none", "--port", port]
    with started(tmp_path, [words] * 2) as running:
        listens(running[0])
        body = {"model": Path(model).name, "prompt": "hi", "max_tokens": 90000, "stream": True}
        asked = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        asked.add_header("Content-Type", "application/json")
        with urlopen(asked) as answer:
            assert answer.readline()
            running[1].kill()
            (said,) = ended(running[:1], SOON)
    assert said.code == 1 and "another rank has ended" in said.sentences[-1]


def listens(server: subprocess.Popen[str]) -> None:
    """Wait until it does."""
    while "Ctrl+C ends it" not in (line := server.stderr.readline()):
        assert line, "it has ended"


def test_the_launcher_ends_a_server_that_has_nothing_to_do_when_a_rank_is_killed(tmp_path, model):
    words = ["-m", "dflash_mlx.serve", "--model", model, "--method", "none"]
    with launched(tmp_path, 2, [*words, "--port", free_ports(1)[0]]) as launcher:
        listens(launcher)
        kill(tmp_path, 1)
        (said,) = ended([launcher], SOON)
    assert "rank 1 exited with code -9" in said.error
    assert "rank 0 exited with code -15" in said.error, "SIGTERM, which the launcher sends"


def test_a_program_that_is_alone_asks_for_no_others(monkeypatch, tmp_path):
    assert not ranks.launched()
    (tmp_path / "hosts").write_text("")  # as mlx.launch makes it for one process
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("MLX_RANK", "0")
    assert not ranks.launched()
    (tmp_path / "hosts").write_text('["127.0.0.1:1", "127.0.0.1:2"]')
    assert ranks.launched()


def test_a_server_needs_only_its_part_of_the_memory(monkeypatch):
    monkeypatch.setattr("dflash_mlx.models.downloads.on_cpu", lambda: True)
    names = find_names(PairConfig())
    whole, part = needed_by(names), needed_by(names, 3)
    monkeypatch.setattr("dflash_mlx.models.downloads.available_memory", lambda: (whole + part) // 2)
    check_memory(PairConfig(), machines=3)
    with pytest.raises(DFlashError, match="as float32, without a GPU, .* a smaller model"):
        check_memory(PairConfig())


def test_the_commands_of_the_page_are_there_and_take_what_it_gives_them(monkeypatch):
    fetched = []
    monkeypatch.setattr(disk, "download", fetched.append)
    (words,) = re.findall("`dflash-chat models (.+?)`", PAGE)
    disk.models(words.split())
    assert [config.model for config in fetched] == ["NAME"]
    lines = re.findall(r"dflash_mlx\.generate (--.+)", PAGE)
    parsed = [generate.parser().parse_args(shlex.split(line)) for line in lines]
    given = {(getattr(each, "model", None), each.prompt) for each in parsed}
    assert given == {("NAME", "Hello"), (None, "Hello")}
    names = set(re.findall(r"dflash_mlx\.(\w+)", PAGE))
    assert names >= {"generate", "benchmark", "serve"}
    doors = ("dflash_mlx/{}.py", "dflash_mlx/{}/__main__.py")
    assert all(any((ROOT / door.format(name)).exists() for door in doors) for name in names)
