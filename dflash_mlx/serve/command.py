"""`dflash-serve`: checks everything, loads the pair, then listens."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dflash_mlx.cli import options as cli
from dflash_mlx.cli.user_config import FaceConfig, parse
from dflash_mlx.core.config import DecodeConfig, PairConfig, PrefixConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.downloads import check_memory
from dflash_mlx.models.names import DEFAULT_MODEL, existing
from dflash_mlx.serve.settings import ServeConfig

PROGRAM = "dflash-serve"
KEY = "DFLASH_KEY"  # environment variable
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def main(argv: Sequence[str], reader: cli.TargetReader = cli.WHOLE) -> None:
    """Serve until a signal ends it. Raises DFlashError for bad input, before anything listens."""
    arguments = parse(parser(), argv)
    check_installed()
    config = cli.read_decode_config(arguments)
    serve = read_serve_config(arguments)
    pair_config = cli.read_pair_config(arguments)
    kept = cli.read_options(arguments, PrefixConfig)
    place = bind(serve.host, serve.port)
    if reader.parts > 1:
        kept = in_memory(kept)
    check_memory(pair_config, reader.parts)
    from dflash_mlx.serve.running import run

    load = partial(cli.open_pair, arguments, config, reader=reader)
    run(load, place, serve, config, kept, names(pair_config, serve))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = cli.Parser(
        prog=PROGRAM,
        description="Serve a model to programs that speak OpenAI's or Anthropic's API. Requests "
        "may ask for other sampling and lengths than the options say.",
    )
    cli.add_options(result, FaceConfig, without=("system", "theme"))
    cli.add_options(result, ServeConfig, PrefixConfig, PairConfig, DecodeConfig, SamplingConfig)
    return result


def read_serve_config(arguments: argparse.Namespace) -> ServeConfig:
    """The server's own settings; the key may come from the environment."""
    given = vars(arguments)
    if "key" not in given and KEY in os.environ:
        given["key"] = os.environ[KEY]
    return cli.read_options(arguments, ServeConfig)


def in_memory(kept: PrefixConfig) -> PrefixConfig:
    """What several ranks keep, each of which has only a part; DFlashError for files."""
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


def names(pair: PairConfig, serve: ServeConfig) -> tuple[str, ...]:
    """By which clients know the model; never where its files are."""
    own = pair.model or DEFAULT_MODEL
    if (path := existing(own)) is not None:
        own = path.resolve().name
    return tuple(dict.fromkeys((own, *serve.name)))


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
