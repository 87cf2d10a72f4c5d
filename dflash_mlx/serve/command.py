"""`dflash-serve`: checks everything, loads the pair, then listens."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import distribution
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dflash_mlx.cli import launch
from dflash_mlx.cli import options as cli
from dflash_mlx.cli.user_config import FaceConfig, parse
from dflash_mlx.core.config import DecodeConfig, PairConfig, PrefixConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.downloads import check_memory, needed_by
from dflash_mlx.models.library import local_folders
from dflash_mlx.models.load import make_ready
from dflash_mlx.models.names import DEFAULT_MODEL, existing, find_names
from dflash_mlx.models.source import MODEL, is_whole
from dflash_mlx.serve.settings import ServeConfig

PROGRAM = "dflash-serve"
KEY = "DFLASH_KEY"  # environment variable
LONGEST = 4096  # tokens of an answer: Codex asks for no number, and fails where one is cut
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def main(argv: Sequence[str], reader: cli.TargetReader = cli.WHOLE) -> None:
    """Serve until a signal ends it. Raises DFlashError for bad input, before anything listens."""
    words, more = launch.split(argv)
    arguments = parse(parser(), words)
    arguments.kept = {"max_tokens": LONGEST, **arguments.kept}
    check_installed()
    config = cli.read_decode_config(arguments)
    serve = read_serve_config(arguments)
    kept = cli.read_options(arguments, PrefixConfig)
    asked = each_model(arguments, serve.models_dir)
    pairs = [cli.read_pair_config(each) for each in asked]
    called = names(pairs, serve)
    name, key = called[0][0], serve.key[0] if serve.key else "none"
    found = launch.Served(launch.url_of(serve.host, serve.port), name, key)
    if launch.launch(arguments, found, words, more):
        return
    place = bind(serve.host, serve.port)
    if reader.parts > 1:
        kept = in_memory(kept, len(pairs))
    check_memory(pairs[0], reader.parts)
    from dflash_mlx.serve.running import run
    from dflash_mlx.session.models import Model

    client = arguments.client
    served: list[Model] = []
    for arguments, pair, its in zip(asked, pairs, called, strict=True):
        if served:  # downloaded now, if need be: a request may not do that
            make_ready(pair, config)
        load = partial(cli.open_pair, arguments, config, reader=reader)
        served.append(Model(its, load, needed_by(find_names(pair)) if len(pairs) > 1 else 0))
    if client is not None:
        found = replace(found, url=launch.url_of(serve.host, place.getsockname()[1]))
        print(launch.line(client, found, more), flush=True)
    run(served, place, serve, config, kept)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API. "
        "Requests may ask for other sampling and lengths than the options say.",
    )
    launch.add_options(result)
    result.add_argument("more", nargs="*", metavar="-- ...", help="words for that program")
    cli.add_options(result, FaceConfig, without=("system", "theme"))
    told = (
        "target: a Hugging Face id, a local folder or a GGUF file; may be repeated: the first is "
        "loaded at once, others when asked for (default: the embedded SmolLM2-135M)"
    )
    result.add_argument("--model", action=_Models, default=argparse.SUPPRESS, help=told)
    told = f"where a request does not say, stop after this many tokens (default: {LONGEST})"
    result.add_argument("--max-tokens", type=int, default=argparse.SUPPRESS, help=told)
    settings = ServeConfig, PrefixConfig, PairConfig, DecodeConfig, SamplingConfig
    cli.add_options(result, *settings, without=("model", "max_tokens"))
    return result


class _Models(argparse.Action):
    """The first is `model`, as of other commands; `models` has all."""

    def __call__(self, parser: object, into: argparse.Namespace, value: Any, _: object = 0) -> None:
        into.models = [*getattr(into, "models", ()), value]
        into.model = into.models[0]


def each_model(arguments: argparse.Namespace, folder: str | None) -> list[argparse.Namespace]:
    """The command line for each model by itself. folder: `models_dir`; DFlashError if it has none.

    Without any model that is the one of the user's file, or the default one.
    """
    asked = list(getattr(arguments, "models", ()))
    if folder is not None:
        found = [each for each in local_folders(Path(folder).expanduser()) if is_whole(each)]
        if not (here := [each.name for each in found if each.option == MODEL]):
            what = f"models_dir is {folder!r}, in which there is no whole model"
            raise DFlashError(what, "name a folder whose folders are models", "models_dir")
        asked += here
    given = vars(arguments)
    own = [argparse.Namespace(**{**given, "model": each}) for each in dict.fromkeys(asked)]
    return own or [arguments]


def read_serve_config(arguments: argparse.Namespace) -> ServeConfig:
    """The server's own settings; the key may come from the environment."""
    given = vars(arguments)
    if "key" not in given and KEY in os.environ:
        given["key"] = [os.environ[KEY]]
    return cli.read_options(arguments, ServeConfig)


def in_memory(kept: PrefixConfig, models: int) -> PrefixConfig:
    """What several ranks keep, each of which has only a part; DFlashError for files, and models."""
    if models > 1:
        what = f"several ranks share one model, and {models} are to be served"
        raise DFlashError(what, "name one with --model", "model")
    if kept.prefix_disk_gb not in (0, PrefixConfig().prefix_disk_gb):
        what = f"prefix_disk_gb is {kept.prefix_disk_gb}, and several ranks keep no files"
        raise DFlashError(what, "leave it out", "prefix_disk_gb")
    return replace(kept, prefix_disk_gb=0)


def check_installed() -> None:
    """DFlashError where the packages that serve are not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise DFlashError(what, f"run {install_line()}")


def install_line(prefix: Path = Path(sys.prefix)) -> str:
    """What adds the extra `serve` to this installation: a line for uv tool, for pipx or for pip."""
    origin = json.loads(distribution("dflash-chat").read_text("direct_url.json") or "{}")
    place = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):  # a checkout, as scripts/chat makes it
        return shlex.quote(f"{unquote(urlsplit(place).path)}/scripts/serve")
    if "vcs_info" in origin:
        place = f"{origin['vcs_info']['vcs']}+{place}"
    wanted = shlex.quote("dflash-chat[serve]" + f" @ {place}" * bool(place))
    tools = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install --force"}
    found = (command for file, command in tools.items() if (prefix / file).exists())
    return f"{next(found, shlex.quote(sys.executable) + ' -m pip install')} {wanted}"


def names(pairs: Sequence[PairConfig], serve: ServeConfig) -> list[tuple[str, ...]]:
    """By which clients know the models; never where their files are. DFlashError for twins."""
    own = [pair.model or DEFAULT_MODEL for pair in pairs]
    own = [each if (path := existing(each)) is None else path.resolve().name for each in own]
    called = [tuple(dict.fromkeys((own[0], *serve.name))), *((each,) for each in own[1:])]
    if twice := [name for name, count in Counter(chain(*called)).items() if count > 1]:
        what = f"two models would be called {twice[0]!r}"
        raise DFlashError(what, "rename a folder, or leave one out", "model")
    return called


def bind(host: str, port: int) -> socket.socket:
    """A socket that nobody else listens on, and that does not listen yet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        place = socket.socket(family)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except socket.gaierror as error:
        what = f"host is {host!r}, which is not an address of this machine ({error.strerror})"
        raise DFlashError(what, "choose 127.0.0.1, or an address of this machine", "host") from None
    except OSError as error:
        what = f"port is {port}, which cannot be opened on {host} ({error.strerror})"
        raise DFlashError(what, "end the program that has it, or choose another", "port") from None
    return place
