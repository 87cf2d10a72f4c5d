"""Peers that answer one request after the other: processes that stay, asked in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_mlx.benchmark.selection import BenchmarkPrompt
from dflash_mlx.system.cpu_math import applies as on_cpu
from peers.environment import PeerError, last_line, python_of, started, variables
from peers.place import Place
from peers.runs import Runs
from peers.table import ALONE

WORKER = Path(__file__).parent / "worker.py"
WHY = {
    "drafter": "the pair has no draft model",
    "small": "no small model is given with --small",
    "head": "the target has no head for multi-token prediction",
}
_WARM = 8  # tokens of an answer that counts for nothing
Found = dict[str, Any]


class Worker:
    """A process that answers; PeerError where it cannot."""

    def __init__(self, name: str, place: Place) -> None:
        peer, folders = ALONE[name], place.folders
        for need in peer.needs:
            if getattr(folders, need) is None:
                raise PeerError(WHY[need])
        python = python_of(peer.environment, place.environments, place.python)
        options = {**peer.options, "pair": dict(place.pair), "quantize": not on_cpu()}
        names = [str(each or "") for each in (folders.target, folders.drafter, folders.small)]
        self.log = place.out / f"{name.replace(' ', '-')}.log"
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [str(python), str(WORKER), peer.who, *names, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=place.environments,
                env=dict(variables(peer.environment, place.out / "home")),
            )
        self._read()

    def ask(self, tokens: Sequence[int], most: int) -> Found:
        """The answer to a prompt and its times, see worker.py."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what it said last is told below
            self.process.stdin.write(json.dumps({"tokens": [*tokens], "most": most}) + "\n")
            self.process.stdin.flush()
        return self._read()

    def _read(self) -> Found:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            found: Found = json.loads(line)
            return found
        self.end()
        raise PeerError(f"it fails: {last_line(self.log.read_text(errors='replace'))}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(
    names: Sequence[str], place: Place, prompts: Sequence[BenchmarkPrompt], most: int, runs: Runs
) -> dict[str, str]:
    """Add a line for every prompt that is missing in `runs`; returns why some peers have none.

    Every prompt is answered by all in turn, and the order turns from prompt to prompt.
    """
    failed: dict[str, str] = {}
    missing = [(i, p) for i, p in enumerate(prompts) if not runs.has(id=p.id, context=p.context)]
    if not missing:
        return failed
    with started(names, lambda name: Worker(name, place), failed) as running:
        for name in running:
            _ask(running, failed, name, prompts[0].tokens, _WARM)
        for i, prompt in missing:
            able = [name for name in running if name not in failed]
            first = i % max(len(able), 1)
            order = [*able[first:], *able[:first]]
            answers = {n: _ask(running, failed, n, prompt.tokens, most) for n in order}
            answers = {n: found for n, found in answers.items() if found}
            about = {"id": prompt.id, "category": prompt.category, "context": prompt.context}
            runs.add(**about, prompt=list(prompt.tokens), answers=answers, failed=dict(failed))
            print(f"{i + 1} of {len(prompts)}: {prompt.category} {prompt.id}", file=sys.stderr)
    return failed


def _ask(
    running: Mapping[str, Worker], failed: dict[str, str], name: str, tokens: Any, most: int
) -> Found:
    """An answer; {} of a peer that fails now, which is not asked again."""
    try:
        return running[name].ask(tokens, most)
    except PeerError as error:
        failed[name] = str(error)
        return {}
