"""Kernels are tried in a child process first, and what came of it is remembered.

A verdict holds for a machine, these sources and this MLX. A try that never ended may have been left
with its program, or have taken the machine down: it is made once more, and no third time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels_metal.children import Children, Gone
from kernels_metal.dispatch import Arguments, fingerprint
from kernels_metal.faults import Faults, Keep
from kernels_metal.gpu import gpu_family
from kernels_metal.operation import Operation

SECONDS = 30.0  # for a try: half a minute on a slow machine is already a hang
_BEGUN = "a try of it has begun"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
Run = Callable[[str], str]  # of what to try, as JSON: what is wrong with it, "" for nothing
COMMAND = (sys.executable, "-m", "kernels_metal.trial")


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel may run in this process, and why not."""

    safe: bool
    reason: str


class Trials:
    """Tries kernels in a process of its own, one behind the other."""

    def __init__(self, command: Sequence[str] = COMMAND, seconds: float = SECONDS) -> None:
        self._children, self._seconds = Children(command), seconds

    def __call__(self, given: str) -> str:
        """What is wrong, "" for nothing."""
        try:
            return str(self._children.ask(json.loads(given), self._seconds))
        except Gone as gone:
            return str(gone)


class Watchdog:
    """The verdicts of one machine, kept in `folder`; one that cannot be kept holds for now."""

    def __init__(self, folder: Path, keep: Keep, run: Run | None = None) -> None:
        self._file = file_of(folder)
        self._write, self._run = keep, run or Trials()
        self._report = Faults(folder / "faults", keep).report
        self._found: dict[str, Verdict] = {}  # here; others may add to the file meanwhile

    def refusal(self, operation: Operation, args: Arguments) -> str:
        """Why the operation's kernels are not to run here with such arguments, "" if they may."""
        if not operation.kernels:  # MLX's own on both sides
            return ""
        variant, sizes = operation.tried(*args)
        dtype = operation.case(*args)[3].partition("+")[0]
        key = "/".join(part for part in (operation.name, variant, dtype) if part)
        if key not in self._found:
            kept = read_verdicts(self._file).get(key)
            given = {"operation": operation.name, "dtype": dtype, "sizes": sizes}
            settled = kept is not None and kept.reason != _BEGUN
            self._found[key] = kept if kept and settled else self._try(key, json.dumps(given), kept)
        verdict = self._found[key]
        return "" if verdict.safe else f"in a trial process: {verdict.reason}"

    def _try(self, key: str, given: str, before: Verdict | None) -> Verdict:
        """Beforehand it is noted that it has begun: who finds that twice tries no third time."""
        twice = f"two tries of it never ended; delete {self._file} to try again"
        self._keep(key, Verdict(False, _BEGUN if before is None else twice))
        try:
            wrong = self._report(self._run(given))
        except BaseException:
            self._keep(key, before)
            raise
        verdict = Verdict(not wrong, wrong or "ran, and agreed with the reference")
        self._keep(key, verdict)
        return verdict

    def _keep(self, key: str, verdict: Verdict | None) -> None:
        """Note it among those that other programs have noted by now; None: nothing is known."""
        verdicts = {k: v for k, v in read_verdicts(self._file).items() if k != key}
        if verdict is not None:
            verdicts[key] = verdict
        plain = {key: asdict(verdict) for key, verdict in verdicts.items()}
        self._write(self._file, json.dumps(plain, indent=1))


def file_of(folder: Path) -> Path:
    """Where the verdicts are that hold here."""
    return folder / "tried" / f"{gpu_family()}-{fingerprint()}.json"


def read_verdicts(file: Path) -> dict[str, Verdict]:
    """What a file of `Watchdog` holds, nothing where there is none or it is damaged."""
    try:
        saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = {key: Verdict(**verdict) for key, verdict in saved.items()}
        good = all(isinstance(v.safe, bool) and isinstance(v.reason, str) for v in found.values())
    except _DAMAGED:
        return {}
    return found if good else {}
