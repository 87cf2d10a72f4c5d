"""How the server listens and what it bears; the command line is made from these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import ABOVE_0, check_values, option, require

LOCAL = "localhost"
MOST_ANSWERS = 16  # of one request
MOST_STOPS, LONGEST_STOP = 16, 500  # stop texts of a request, characters of one
MOST_TOP_LOGPROBS = 20
MOST_PICTURES, MOST_PIXELS = 100, 200 * 10**6  # of a request
MOST_TOKENS = 1024  # that a request biases, or that end its answer


@dataclass(frozen=True)
class ServeConfig:
    """Where the server listens, who may use it, and its limits."""

    host: str = option("127.0.0.1", "address to listen on; one that others reach needs a --key")
    port: int = option(8080, "port to listen on, 0 for any free one", least=0, most=65535)
    key: tuple[str, ...] = option(
        (),
        "key that requests have to send, as Authorization: Bearer or x-api-key; may be repeated, "
        "and what one asks neither helps nor shows in answers to another (default: the environment "
        "variable DFLASH_KEY, which no list of processes shows)",
        action="append",
    )
    name: tuple[str, ...] = option(
        (), "another name of the model, or of the first one; may be repeated", action="append"
    )
    allow_host: tuple[str, ...] = option(
        (), "name of this machine besides localhost; may be repeated", action="append"
    )
    allow_origin: tuple[str, ...] = option(
        (),
        "origin of web pages and desktop programs that may use the server, as "
        "https://chat.example or app://obsidian.md; may be repeated",
        action="append",
    )
    models_dir: str | None = option(
        None, "folder of models: all are served, besides each --model, and loaded when asked for"
    )
    most_loaded: int | None = option(
        None, "models in memory at once, at most (default: as many as fit)", least=1, type=int
    )
    idle_unload: float | None = option(
        None, "idle minutes until a model is unloaded (default: never)", least=ABOVE_0, type=float
    )
    parallel: int = option(8, "answers that are decoded together; further ones wait", least=1)
    queue: int = option(64, "answers that may wait; later clients are told to come back", least=0)
    memory_gb: float | None = option(
        None, "gigabytes for all caches (default: half of what is free)", least=ABOVE_0, type=float
    )
    body_mb: float = option(16.0, "largest request, in megabytes", least=ABOVE_0)
    messages: int = option(4096, "most messages of a conversation", least=1)
    connections: int = option(512, "most open connections", least=1)
    idle: float = option(
        60.0, "seconds that sending a request, reading on or asking again may take", least=ABOVE_0
    )
    grace: float = option(
        30.0, "seconds that running answers may take to finish after Ctrl+C or SIGTERM", least=0
    )
    strict: bool = option(
        False,
        "refuse fields and names of models that are not known here, instead of telling in the "
        "response that they were ignored",
        action="store_true",
    )
    allow_image_urls: bool = option(
        False,
        "let requests name pictures by https addresses, which the server then reads",
        action="store_true",
    )
    remember: bool = option(
        False,
        "keep what was asked and answered on the disk as well, for each key apart, so that it "
        "helps after a restart; without it nothing of a request is written",
        action="store_true",
    )
    watch: bool = option(
        False, "tell every few seconds what it is doing, if anything", action="store_true"
    )

    def __post_init__(self) -> None:
        check_values(self)
        for origin in self.allow_origin:
            known = re.fullmatch(r"(?!file:)[a-z][a-z0-9+.-]*://[^/]+", origin)
            what = "one like https://chat.example or app://obsidian.md"
            require(bool(known), "allow_origin", origin, what)
        for key in self.key:
            plain = key.isascii() and key.isprintable() and key.strip() == key != ""
            require(plain, "key", "...", "visible ASCII characters without spaces around them")
        if not (self.key or is_local(self.host)):
            what = f"host is {self.host!r}, which other machines reach, and there is no key"
            raise DFlashError(what, "give one with --key or DFLASH_KEY", "host")


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    return host == LOCAL or (is_address(host) and ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether it is an address, which no name server can point elsewhere."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
