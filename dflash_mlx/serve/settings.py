"""How the server listens and what it bears; the command line is made from these."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.option import option, require, require_positive, require_possible
from dflash_mlx.serve.hosts import is_local

MOST_ANSWERS = 16  # of one request
MOST_STOPS, LONGEST_STOP = 16, 500  # stop texts of a request, characters of one
MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class ServeConfig:
    """Where the server listens, who may use it, and its limits.

    watched: whether it ends with its standard input, which a view holds that must not outlive it.
    """

    host: str = option(
        "127.0.0.1", "address to listen on; one that other machines reach needs a --key"
    )
    port: int = option(8080, "port to listen on, 0 for any that is free", type=int)
    key: str | None = option(
        None,
        "key that every request has to bring, as Authorization: Bearer or x-api-key (default: the "
        "environment variable DFLASH_KEY, if it is set, so that no list of processes shows it)",
    )
    name: tuple[str, ...] = option(
        (),
        "further name by which clients may ask for the model; may be given several times",
        action="append",
    )
    allow_host: tuple[str, ...] = option(
        (),
        "name by which clients may call this machine, besides localhost and addresses; may be "
        "given several times",
        action="append",
    )
    allow_origin: tuple[str, ...] = option(
        (),
        "origin of web pages that may use the server, as https://chat.example; may be given "
        "several times",
        action="append",
    )
    parallel: int = option(8, "answers that are decoded together; further ones wait", type=int)
    queue: int = option(64, "answers that may wait; beyond that clients are told to", type=int)
    memory_gb: float | None = option(
        None,
        "gigabytes for the caches of all answers (default: half of what the model leaves free)",
        type=float,
    )
    body_mb: float = option(16.0, "megabytes that a request may have", type=float)
    messages: int = option(4096, "messages that a conversation may have", type=int)
    connections: int = option(512, "connections that may be open", type=int)
    idle: float = option(
        60.0,
        "seconds that a client may take to send its request, to go on reading its answer, or to "
        "ask again on an open connection",
        type=float,
    )
    grace: float = option(
        30.0, "seconds that answers may go on after Ctrl+C or a signal to end", type=float
    )

    watched: bool = False

    def __post_init__(self) -> None:
        require_possible(self)
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        for name in ("parallel", "messages", "connections"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.queue >= 0, "queue", self.queue, "0 or more")
        require_positive(self, "body_mb", "idle")
        require(0 <= self.grace < float("inf"), "grace", self.grace, "a finite number from 0 on")
        if self.memory_gb is not None:
            require_positive(self, "memory_gb")
        for origin in self.allow_origin:
            scheme, _, rest = origin.partition("://")
            known = scheme in ("http", "https") and rest and "/" not in rest
            require(bool(known), "allow_origin", origin, "one like https://chat.example")
        if self.key is not None:
            require(self.key.isascii() and self.key.isprintable() and self.key.strip() == self.key
                    and self.key != "", "key", "...", "visible ASCII characters without spaces "
                    "around them")  # fmt: skip
        elif not is_local(self.host):
            what = f"host is {self.host!r}, which other machines reach, and there is no key"
            raise DFlashError(what, "give one with --key or DFLASH_KEY", "host")

    @property
    def body_bytes(self) -> int:
        """Most bytes of a request."""
        return int(self.body_mb * 10**6)
