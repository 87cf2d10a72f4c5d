"""Agents that write code, started with what they need to find a server: `dflash-serve --for`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from threading import Thread
from typing import NoReturn
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from dflash_mlx.cli.options import Parser
from dflash_mlx.core.errors import DFlashError

Start = tuple[list[str], dict[str, str]]  # the words of a command, and variables for it
_LISTENS = re.compile(r"dflash-serve: .* at (http://\S+:\d+)")
_OURS = "dflash"  # who owns the models that our server lists
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a server listens everywhere


@dataclass(frozen=True)
class Served:
    """A server as its clients know it."""

    url: str
    model: str
    key: str = "none"  # programs insist on one
    context: int | None = None  # tokens, where the model is loaded


def url_of(host: str, port: int) -> str:
    """Where programs on this machine find a server."""
    host = _ANY.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _claude(served: Served) -> Start:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    where = {"ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_AUTH_TOKEN": served.key}
    return ["claude"], {**where, **{f"ANTHROPIC_{each}": served.model for each in models}}


def _codex(served: Served) -> Start:
    where = f'base_url="{served.url}/v1",wire_api="responses",env_key="DFLASH_KEY"'
    own = {"model_providers.dflash": f'{{name="dflash",{where}}}', "model_provider": "dflash"}
    own |= {"model": json.dumps(served.model)}
    own |= {"model_context_window": str(served.context)} if served.context else {}
    words = (word for name, value in own.items() for word in ("-c", f"{name}={value}"))
    return ["codex", *words], {"DFLASH_KEY": served.key}


def _opencode(served: Served) -> Start:
    length = served.context
    limit = {"limit": {"context": length, "output": max(1, length // 4)}} if length else {}
    where = {"baseURL": f"{served.url}/v1", "apiKey": "{env:DFLASH_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": where}
    provider |= {"models": {served.model: limit}}
    config = {"provider": {"dflash": provider}, "model": f"dflash/{served.model}"}
    return ["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "DFLASH_KEY": served.key}


CLIENTS: dict[str, tuple[Callable[[Served], Start], str]] = {  # and what npm calls them
    "claude": (_claude, "@anthropic-ai/claude-code"),
    "codex": (_codex, "@openai/codex"),
    "opencode": (_opencode, "opencode-ai"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add those that start a client."""
    told = "print what starts this program with the server"
    parser.add_argument("--for", dest="client", choices=[*CLIENTS], help=told)
    told = "start that program, and the server meanwhile if none listens at the port"
    parser.add_argument("--run", action="store_true", help=told)


def split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words of the server, and those behind -- for a client."""
    at = [*argv, "--"].index("--")
    return argv[:at], argv[at + 1 :]


def launch(
    asked: argparse.Namespace, usual: Served, words: Sequence[str], more: Sequence[str]
) -> bool:
    """Print or start the client that the words name; whether there is nothing else to do.

    usual: the server that the words would start. more: words for the client.
    """
    if asked.more:
        raise DFlashError(f"{asked.more[0]!r} is no option", "put -- before words for a program")
    if asked.client is None:
        if asked.run or more:
            raise DFlashError("a program is to be started, but which is not said", "add --for")
        return False
    served = find(usual)
    if asked.run:
        if shutil.which(asked.client) is None:
            step = f"npm install -g {CLIENTS[asked.client][1]} installs it"
            raise DFlashError(f"{asked.client} is not installed", step)
        if served is not None:
            _run(asked.client, served, more)
        own = Parser(add_help=False, allow_abbrev=False)
        add_options(own)
        with _server(own.parse_known_args(words)[1]) as url:
            _run(asked.client, find(replace(usual, url=url)) or usual, more)
    if served is not None:
        print(line(asked.client, served, more))
    return served is not None


def find(usual: Served) -> Served | None:
    """The server that listens there, None where none of ours does; DFlashError for a wrong key."""
    request = Request(f"{usual.url}/v1/models", headers={"Authorization": f"Bearer {usual.key}"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=5) as response:
            first = json.load(response)["data"][0]
        if first["owned_by"] != _OURS:
            return None
        return replace(usual, model=str(first["id"]), context=first.get("context_length"))
    except HTTPError as error:
        what = f"what listens at {usual.url} answers with {error.code}"
        raise DFlashError(what, "give its key, or another --port", "key") from None
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None


def line(client: str, served: Served, more: Sequence[str]) -> str:
    """What starts a client in a shell; a key is not shown."""
    words, variables = CLIENTS[client][0](served)
    hidden = {served.key: '"$DFLASH_KEY"'} if served.key != Served.key else {}
    shown = (f"{name}={hidden.get(v, shlex.quote(v))}" for name, v in variables.items())
    return " ".join([*shown, shlex.join([*words, *more])])


def _run(client: str, served: Served, more: Sequence[str]) -> NoReturn:
    """Start a client, and leave with its exit code when it ends."""
    words, variables = CLIENTS[client][0](served)
    raise SystemExit(subprocess.call([*words, *more], env={**os.environ, **variables}))


@contextmanager
def _server(words: Sequence[str]) -> Iterator[str]:
    """A server in a process of its own, by its address; leaves with its code where it ends."""
    command = [sys.executable, "-m", "dflash_mlx.serve", *words]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = child.stderr or ()
    try:
        for each in said:
            sys.stderr.write(each)
            if found := _LISTENS.match(each):
                # What it says from now on would be in the midst of the client's screen.
                Thread(target=list, args=(said,), daemon=True).start()
                yield found[1]
                return
        raise SystemExit(child.wait())
    finally:
        child.terminate()
        child.wait()
