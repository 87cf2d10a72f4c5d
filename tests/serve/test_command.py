"""`dflash-serve` as a command: what is refused before anything listens, and how it ends."""

from __future__ import annotations

import json
import select
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_mlx.core.config import PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.serve import command
from dflash_mlx.serve.settings import ServeConfig
from support.models import write_endless_model
from support.serving import CHAT, CLIENT, chat_body, command_of, spawn

NO_MODEL = ("--model", "/no/such/model")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("command") / "endless")


def refused(*argv: object) -> DFlashError:
    with pytest.raises(DFlashError) as found:
        command.main([*map(str, argv)])
    return found.value


def test_a_place_to_listen_on_that_cannot_be_is_refused_before_anything_is_loaded(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
        error = refused("--port", port, *NO_MODEL)
    assert error.setting == "port" and str(port) in str(error)
    assert refused("--host", "no.such.host.invalid", "--key", "k").setting == "host"
    assert refused("--host", "192.0.2.1", "--key", "k", "--port", 0).setting == "port"
    monkeypatch.delenv(command.KEY, raising=False)
    assert refused("--host", "0.0.0.0").setting == "host", "which others reach, so it needs a key"
    monkeypatch.setenv(command.KEY, "secret")
    assert "/no/such/model" in str(refused("--host", "0.0.0.0", "--port", 0, *NO_MODEL))


def test_too_little_memory_and_packages_that_are_missing_are_named(monkeypatch, model):
    monkeypatch.setattr("dflash_mlx.models.downloads.available_memory", lambda: 1000)
    assert "1.0 kB" in str(refused("--model", model, "--port", 0))
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "fastapi" else object())
    assert "fastapi" in str(refused())
    with pytest.raises(SystemExit) as helped:  # which needs none of them
        command.main(["--help"])
    assert helped.value.code == 0


def test_an_answer_may_be_longer_than_elsewhere_unless_the_user_says(monkeypatch, model, tmp_path):
    file, started = tmp_path / "config.toml", []
    file.write_text("max_tokens = 100\n")
    monkeypatch.setattr("dflash_mlx.serve.running.run", lambda *more: started.append(more))
    for more in ([], ["--config", str(file)], ["--config", str(file), "--max-tokens", "7"]):
        own = more or ["--config", "none"]
        command.main(["--model", str(model), "--port", "0", *own])
    assert [usual.max_tokens for *_, usual, kept in started] == [command.LONGEST, 100, 7]


GIT = {"url": "https://example.org/chat", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}}
WANTED = "'dflash-chat[serve] @ git+https://example.org/chat'"
LINES = {  # by the file that a tool leaves beside what it installs, and where it was from
    "uv": ("uv-receipt.toml", GIT, f"uv tool install {WANTED}"),
    "pipx": ("pipx_metadata.json", GIT, f"pipx install --force {WANTED}"),
    "pip": ("pyvenv.cfg", GIT, f"{sys.executable} -m pip install {WANTED}"),
    "an index": ("uv-receipt.toml", None, "uv tool install 'dflash-chat[serve]'"),
    "a checkout": (
        "pyvenv.cfg",
        {"url": "file:///my%20work/chat", "dir_info": {"editable": True}},
        "'/my work/chat/scripts/serve'",
    ),
}


@pytest.mark.parametrize(("file", "origin", "line"), LINES.values(), ids=[*LINES])
def test_the_line_that_installs_the_rest_is_for_the_tool_that_installed_us(
    file, origin, line, tmp_path, monkeypatch
):
    (tmp_path / file).touch()
    found = SimpleNamespace(read_text=lambda name: json.dumps(origin) if origin else None)
    monkeypatch.setattr(command, "distribution", lambda name: found)
    assert command.install_line(tmp_path) == line


def test_clients_do_not_learn_where_the_files_are(model):
    named = command.names([PairConfig(str(model))], ServeConfig(name=("other", "other")))
    assert named == [("endless", "other")]
    assert command.names([PairConfig()], ServeConfig()) == [("SmolLM2-135M-Instruct",)]


INTERRUPTED = """import os, runpy, signal
from dflash_mlx.serve import command
import mlx.core as mx

def load(*_, **__):
    x = mx.ones((64, 64))
    mx.eval(x @ x)
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        mx.eval(x @ x)

signal.signal(signal.SIGINT, signal.default_int_handler)
command.cli.open_pair = load
runpy.run_module("dflash_mlx.serve", run_name="__main__")
"""


def test_ctrl_c_while_the_model_is_loaded_is_130_and_no_more(model, tmp_path):
    running = spawn(model, tmp_path, run=("-c", INTERRUPTED))
    assert (running.communicate(timeout=60)[1].strip(), running.returncode) == ("", 130)


def test_a_kill_leaves_nothing_in_the_way_and_a_signal_ends_what_runs(model, tmp_path):
    body = chat_body("a" * 2000, model="endless", stream=True, max_tokens=50_000)
    for last in (signal.SIGKILL, signal.SIGTERM):
        with command_of(model, tmp_path, "--remember", "--grace", "0.5") as (running, url):
            assert CLIENT.get(url + "/health").json() == {"status": "ok"}
            with CLIENT.stream("POST", url + CHAT, json=body) as response:
                lines = response.iter_lines()
                next(line for line in lines if '"delta":{"content":"' in line)
                running.send_signal(last)
                if last == signal.SIGTERM:
                    assert "shutting down" in [line for line in lines if line][-1]
            assert running.wait(20) == (0 if last == signal.SIGTERM else -signal.SIGKILL)
            assert running.stderr.read() == ""
    assert [*(tmp_path / "cache").glob("dflash-chat/prefixes/*")]  # for the next start


def test_with_watch_it_tells_what_it_is_doing_while_it_does_anything(model, tmp_path):
    with command_of(model, tmp_path, "--watch", "--grace", "0") as (running, url):
        body = chat_body("a" * 2000, model="endless", stream=True, max_tokens=50_000)
        with CLIENT.stream("POST", url + CHAT, json=body):
            assert select.select([running.stderr], [], [], 20)[0], "it told nothing"
            said = running.stderr.readline()
    assert "1 answer in the making, 0 waiting" in said and "0 answers done" in said
