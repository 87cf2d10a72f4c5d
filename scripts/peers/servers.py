"""Servers that run side by side and take turns: each is asked the same by several clients."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.system.cpu_math import applies as on_cpu
from peers.environment import PeerError, last_line, python_of, started, variables
from peers.place import Place
from peers.runs import Runs
from peers.table import SERVERS, Server

SHORTEST, LONGEST = 16, 64  # tokens of an answer
_PATIENCE = 600.0  # seconds for one request, and until a server answers at all
_WARM = 2  # requests of each client that count for nothing
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Running:
    """A server that answers, at `url`."""

    server: Server
    process: subprocess.Popen[bytes]
    log: Path
    port: int
    places: Mapping[str, str]

    def body(self, request: Row) -> dict[str, Any]:
        """What is sent for a request; ours goes by the name that our server tells."""
        model = self.server.model.format(**self.places)
        return {"model": model or "default", "temperature": 0, **request, **self.server.more}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, client: httpx.AsyncClient, request: Row) -> tuple[str, float]:
        """What is answered, and in how many seconds; PeerError where it is no answer."""
        begin = time.perf_counter()
        try:
            found = await client.post(f"{self.url}/v1/chat/completions", json=self.body(request))
        except httpx.HTTPError as error:
            raise PeerError(f"it does not answer ({error!r}; {self.last_words()})") from None
        seconds = time.perf_counter() - begin
        if found.status_code != 200:
            raise PeerError(f"it answers {found.status_code}: {last_line(found.text)}")
        return str(found.json()["choices"][0]["message"]["content"]), seconds

    def last_words(self) -> str:
        return last_line(self.log.read_text(errors="replace"))

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def requests(rows: Sequence[Row], number: int) -> list[dict[str, Any]]:
    """So many of them, of any category, each with its length; the same whenever they are drawn."""
    draw = random.Random(0)
    if number > len(rows):
        what = f"{number} requests are asked for, and there are {len(rows)} prompts"
        raise DFlashError(what, "take fewer --requests or --runs, so that none comes twice")
    return [
        {"messages": row["messages"], "max_tokens": draw.randint(SHORTEST, LONGEST)}
        for row in draw.sample(list(rows), number)
    ]


def start(name: str, place: Place) -> Running:
    """Start a server and wait until it answers; PeerError where it does not."""
    server = SERVERS[name]
    if server.needs_drafter and place.folders.drafter is None:
        raise PeerError("the pair has no draft model")
    python = python_of(server.environment, place.environments, place.python)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = place.folders.places(port=port)
    words = server.command(places, metal=not on_cpu())
    words += place.words if not server.environment else ()
    log = place.out / f"{name.replace(' ', '-')}.log"
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [str(python), "-m", *words],
            stdout=output,
            stderr=output,
            cwd=place.environments,  # where no folder has the name of a package
            env=dict(variables(server.environment, place.out / "home")),
        )
    running = Running(server, process, log, port, places)
    try:
        _wait(running)
        if server.gives_up and server.gives_up in (said := log.read_text(errors="replace")):
            why = said.rpartition(server.gives_up)[2].splitlines()[0].strip(" :")
            raise PeerError(f"it does not draft: {why}")
    except BaseException:
        running.end()
        raise
    return running


def _wait(running: Running) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if running.process.poll() is not None:
            raise PeerError(f"it ends by itself ({running.last_words()})")
        try:
            if httpx.get(f"{running.url}/v1/models", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise PeerError(f"it answers nothing in {_PATIENCE:.0f} s ({running.last_words()})")


async def turn(
    running: Running, asked: Sequence[Row], fillers: Sequence[Row], clients: int
) -> list[tuple[str, float]]:
    """Answer and seconds of each, by so many clients that ask again as soon as they are answered.

    When nothing is left to ask, clients go on with `fillers` until all is answered, so that a
    request has as much company at the end as before.
    """
    queue, found = iter(enumerate(asked)), dict[int, tuple[str, float]]()

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=_PATIENCE) as http:
            while len(found) < len(asked):
                i, request = next(queue, (-1, fillers[number % len(fillers)]))
                answer = await running.ask(http, request)
                if i >= 0:
                    found[i] = answer

    await asyncio.gather(*map(client, range(clients)))
    return [found[i] for i in range(len(asked))]


@dataclass(frozen=True)
class Plan:
    """What is asked: so many requests a turn, so many turns of each server."""

    clients: tuple[int, ...]
    requests: int
    runs: int

    def turns(self, names: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Run and server; the order turns from run to run."""
        for run in range(self.runs):
            first = run % len(names)
            yield from ((run, name) for name in [*names[first:], *names[:first]])


def measure(
    names: Sequence[str], place: Place, rows: Sequence[Row], plan: Plan, runs: Runs
) -> dict[str, str]:
    """Add all turns that are missing in `runs`; returns why some servers have none, by name.

    Servers are started anew for each number of clients, so that none has read a prompt before.
    """
    failed: dict[str, str] = {}
    total = plan.requests * plan.runs
    whole = requests(rows, total + _WARM * max(plan.clients))
    for clients in plan.clients:
        known = partial(runs.has, clients=clients)
        missing = [turn for turn in plan.turns(names) if not known(run=turn[0], peer=turn[1])]
        needed = [name for name in names if any(name == other for _, other in missing)]
        with started(needed, lambda name: start(name, place), failed) as running:
            part = partial(_turn, running, failed, whole[total:], clients)
            for name in needed:
                part(name, whole[total : total + _WARM * clients])
            for run, name in missing:
                begin = run * plan.requests
                if found := part(name, whole[begin : begin + plan.requests]):
                    limits = [each["max_tokens"] for each in whole[begin:]]
                    answers = [
                        {"text": text, "seconds": seconds, "most": most}
                        for (text, seconds), most in zip(found, limits, strict=False)
                    ]
                    runs.add(clients=clients, run=run, peer=name, answers=answers)
                    print(f"{clients} clients, run {run + 1}: {name} is done", file=sys.stderr)
    return failed


def _turn(
    running: Mapping[str, Running],
    failed: dict[str, str],
    fillers: Sequence[Row],
    clients: int,
    name: str,
    asked: Sequence[Row],
) -> list[tuple[str, float]]:
    """As `turn`; nothing for a server that has failed, or does so now."""
    if name in failed:
        return []
    try:
        return asyncio.run(turn(running[name], asked, fillers, clients))
    except PeerError as error:
        failed[name] = str(error)
        return []
