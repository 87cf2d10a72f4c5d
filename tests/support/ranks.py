"""Several ranks on this machine, over loopback: how they are started, and what each has said."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OTHERS = "[ring]", "[transformers]"  # begin lines of libraries, and of no end


@dataclass
class Said:
    """What became of a rank."""

    code: int
    out: str
    error: str

    @property
    def sentences(self) -> list[str]:
        """Its stderr without what libraries say."""
        lines = self.error.splitlines()
        return [line for line in lines if not line.startswith(_OTHERS)]


def free_ports(count: int) -> list[int]:
    """Nobody listens on them now."""
    with ExitStack() as stack:
        places = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [place.getsockname()[1] for place in places]


def hosts_file(folder: Path, ranks: int) -> Path:
    """Where MLX finds the ranks."""
    file = folder / "hosts.json"
    file.write_text(json.dumps([f"127.0.0.1:{port}" for port in free_ports(ranks)]))
    return file


@contextmanager
def started(
    folder: Path, words: Sequence[Sequence[str]], places: Sequence[Path] = ()
) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each rank's words behind `python`, in its place; none is left at the end."""
    hosts, running = hosts_file(folder, len(words)), []
    try:
        for rank, own in enumerate(words):
            environment = {
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path[1:]]),
                **({"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} if len(words) > 1 else {}),
                "XDG_CACHE_HOME": str(folder / "cache"),
            }
            running.append(
                subprocess.Popen(
                    [sys.executable, *map(str, own)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=places[rank] if places else ROOT,
                    env=environment,
                )
            )
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def ended(running: Sequence[subprocess.Popen[str]], seconds: float = 120) -> list[Said]:
    """What all of them have said, once they are over."""
    end, found = time.monotonic() + seconds, []
    for process in running:
        out, error = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        found.append(Said(process.returncode, out, error))
    return found


def on_ranks(folder: Path, count: int, *words: str) -> list[Said]:
    """The same words on so many ranks, to their end."""
    with started(folder, [words] * count) as running:
        return ended(running)


@contextmanager
def launched(folder: Path, count: int, words: Sequence[object]) -> Iterator[subprocess.Popen[str]]:
    """MLX's launcher, with the same words behind `python` on so many ranks."""
    launch = ["-c", "from mlx._distributed_utils.launch import main; main()", "-n", count]
    noted = ["sh", "-c", 'echo $$ > "$0.$MLX_RANK"; exec "$@"', folder / "pid", sys.executable]
    command = [*launch, "--backend", "ring", "-p", free_ports(1)[0], "--", *noted, *words]
    with started(folder, [command]) as (launcher,):
        try:
            yield launcher
        finally:
            if launcher.poll() is None:  # something went wrong, and it would leave them behind
                launcher.terminate()
                for rank in range(count):
                    kill(folder, rank)


def kill(folder: Path, rank: int) -> None:
    """One of those that were launched."""
    os.kill(int((folder / f"pid.{rank}").read_text()), signal.SIGKILL)
