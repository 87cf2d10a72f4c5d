"""`dflash-serve --for`: programs that are not ours, with what they need to find the server."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.serve import command
from support.models import write_endless_model
from support.serving import MODEL, serving, spawn, speak

CLIENTS = ("claude", "codex", "opencode")
TELLS = """#!{python}
import json, os, sys
own = {{k: v for k, v in os.environ.items() if k.startswith(("ANTHROPIC", "OPENCODE", "DFLASH"))}}
json.dump([own, sys.argv[1:]], open({file!r}, "w"))
sys.exit(7)
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What each program was started with; the programs do nothing else and end with 7."""
    for name in CLIENTS:
        script = tmp_path / name
        script.write_text(TELLS.format(python=sys.executable, file=str(tmp_path / "told")))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(command.KEY, raising=False)
    return lambda: json.loads((tmp_path / "told").read_text())


def where(server, client):
    """How a client finds this server: in its variables, and in its words."""
    if client == "claude":
        return {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_MODEL": MODEL}
    if client == "codex":
        return {"DFLASH_KEY": "none"}
    provider = {"baseURL": f"{server.url}/v1", "apiKey": "{env:DFLASH_KEY}"}
    models = {MODEL: {"limit": {"context": 4000, "output": 1000}}}
    npm = {"npm": "@ai-sdk/openai-compatible", "options": provider, "models": models}
    return {"OPENCODE_CONFIG_CONTENT": {"provider": {"dflash": npm}, "model": f"dflash/{MODEL}"}}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_program_is_printed_and_started_for_a_server_that_runs(server, told, client, capsys):
    words = ["--port", str(server.port), "--for", client]
    with pytest.raises(SystemExit) as ended:
        command.main([*words, "--run", "--", "-p", "a b"])
    own, given = told()
    own = {k: json.loads(v) if v.startswith("{") else v for k, v in own.items()}
    assert ended.value.code == 7 and given[-2:] == ["-p", "a b"]
    assert own.items() >= where(server, client).items()
    if client == "codex":
        assert f'base_url="{server.url}/v1"' in " ".join(given)
        assert {f'model="{MODEL}"', "model_context_window=4000"} <= {*given}
    command.main([*words, "--", "-p", "a b"])
    shown = shlex.split(capsys.readouterr().out)
    at = shown.index(client)
    assert shown[at + 1 :] == given
    assert {pair.partition("=")[0] for pair in shown[:at]} == {*own}


def test_a_server_is_found_while_its_first_model_is_not_in_memory(told, capsys):
    with serving(speak, idle_unload=0.001) as server:
        server.until(lambda: server.models._all[0].pair is None)
        command.main(["--port", str(server.port), "--for", "codex"])
    shown = capsys.readouterr().out
    assert f'model="{MODEL}"' in shown and "model_context_window" not in shown


def test_a_key_is_handed_on_but_not_shown(told, capsys):
    with serving(speak, key=("secret",)) as server:
        words = ["--port", str(server.port), "--for", "claude", "--key"]
        command.main([*words, "secret"])
        with pytest.raises(SystemExit):
            command.main([*words, "secret", "--run"])
        with pytest.raises(DFlashError) as wrong:
            command.main([*words, "other"])
    assert told()[0]["ANTHROPIC_AUTH_TOKEN"] == "secret" and wrong.value.setting == "key"
    assert 'ANTHROPIC_AUTH_TOKEN="$DFLASH_KEY"' in (shown := capsys.readouterr().out)
    assert "secret" not in shown


def test_a_program_that_is_missing_or_not_named_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DFlashError, match=r"codex is not installed.*@openai/codex"):
        command.main(["--for", "codex", "--run", "--port", "1"])
    for words in (["--run"], ["--", "-p"]):
        with pytest.raises(DFlashError, match="--for"):
            command.main(words)
    with pytest.raises(SystemExit) as ended:
        command.main(["--for", "vim"])
    assert ended.value.code == 2 and "claude, codex, opencode" in capsys.readouterr().err


def test_where_nothing_listens_a_server_runs_as_long_as_the_program(told, tmp_path):
    model = write_endless_model(tmp_path / "endless")
    running = spawn(model, tmp_path, "--for", "claude", "--run", "--", "a")
    said = running.communicate(timeout=60)[1]
    own, given = told()
    assert (running.returncode, given, own["ANTHROPIC_MODEL"]) == (7, ["a"], "endless")
    assert f"endless at {own['ANTHROPIC_BASE_URL']}" in said
    port = own["ANTHROPIC_BASE_URL"].rpartition(":")[2]
    with command.bind("127.0.0.1", int(port)):
        pass  # nobody has it any more


def test_without_run_the_server_starts_and_says_how_to_start_the_program(told, tmp_path):
    model = write_endless_model(tmp_path / "endless")
    running = spawn(model, tmp_path, "--for", "claude", stdout=subprocess.PIPE)
    try:
        shown = dict(pair.split("=", 1) for pair in shlex.split(running.stdout.readline())[:-1])
        line = next(line for line in running.stderr if "http://" in line)
    finally:
        running.kill()
        running.communicate()
    assert shown["ANTHROPIC_BASE_URL"] in line and shown["ANTHROPIC_MODEL"] == "endless"
