"""Kernels are tried in a child process first, and what came of it is remembered.

A verdict holds for a machine, these sources and this MLX. A try that never ended, as one that took
the machine down with it, counts as a refusal.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels_metal.dispatch import Arguments, fingerprint
from kernels_metal.gpu import gpu_family
from kernels_metal.operation import Operation

SECONDS = 30.0  # for a try: half a minute on a slow machine is already a hang
_UNENDED = "a try of it never ended; delete this file to try again"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
Run = Callable[[str], str]  # of what to try, as JSON: what is wrong with it, "" for nothing


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel may run in this process, and why not."""

    safe: bool
    reason: str


def in_child(given: str, seconds: float = SECONDS, command: Sequence[str] = ()) -> str:
    """Try kernels in a process of its own. Returns what is wrong, "" for nothing."""
    start = command or (sys.executable, "-m", "kernels_metal.trial")
    try:
        child = subprocess.Popen(
            [*start, given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        return f"could not be tried: {error}"
    try:
        said = child.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits for the GPU may not end
            child.communicate(timeout=1)
        return f"hangs: a try of it did not end within {seconds:.0f} s"
    last = said.strip().splitlines()[-1:] or [""]
    if child.returncode:
        return f"ends the process with {child.returncode}: {last[0]}"
    return last[0]


class Watchdog:
    """The verdicts of one machine, kept in `folder`; one that cannot be kept holds for now."""

    def __init__(self, folder: Path, run: Run = in_child) -> None:
        self._file = folder / "tried" / f"{gpu_family()}-{fingerprint()}.json"
        self._run = run
        self.verdicts = read_verdicts(self._file)

    def refusal(self, operation: Operation, args: Arguments) -> str:
        """Why the operation's kernels are not to run here with such arguments, "" if they may."""
        if not operation.kernels:  # MLX's own on both sides
            return ""
        variant, sizes = operation.tried(*args)
        dtype = operation.case(*args)[3].partition("+")[0]
        key = "/".join(part for part in (operation.name, variant, dtype) if part)
        if key not in self.verdicts:
            self._keep(key, Verdict(False, _UNENDED))
            given = {"operation": operation.name, "dtype": dtype, "sizes": sizes}
            wrong = self._run(json.dumps(given))
            self._keep(key, Verdict(not wrong, wrong or "ran, and agreed with the reference"))
        verdict = self.verdicts[key]
        return "" if verdict.safe else f"in a trial process: {verdict.reason}"

    def _keep(self, key: str, verdict: Verdict) -> None:
        self.verdicts[key] = verdict
        plain = {key: asdict(verdict) for key, verdict in self.verdicts.items()}
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(plain, indent=1), encoding="utf-8")


def read_verdicts(file: Path) -> dict[str, Verdict]:
    """What a file of `Watchdog` holds, nothing where there is none or it is damaged."""
    try:
        saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = {key: Verdict(**verdict) for key, verdict in saved.items()}
        good = all(isinstance(v.safe, bool) and isinstance(v.reason, str) for v in found.values())
    except _DAMAGED:
        return {}
    return found if good else {}
