"""Kernels are tried in a child process first, and what came of it is remembered.

A verdict holds for a machine, these sources and this MLX. A try that never ended may have been left
with its program, or have taken the machine down: it is made once more, and no third time.
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
from kernels_metal.faults import Faults, Keep
from kernels_metal.gpu import gpu_family
from kernels_metal.operation import Operation

SECONDS = 30.0  # for a try: half a minute on a slow machine is already a hang
_BEGUN = "a try of it has begun"
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
Run = Callable[[str], str]  # of what to try, as JSON: what is wrong with it, "" for nothing
OUTCOME = "outcome: "  # before the line of a child that is not another program's noise


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel may run in this process, and why not."""

    safe: bool
    reason: str


def in_child(given: str, seconds: float = SECONDS, command: Sequence[str] = ()) -> str:
    """Try kernels in a process of its own. Returns what is wrong, "" for nothing.

    The terminal's Ctrl+C does not reach the child, whose end would count as the kernel's fault.
    """
    start = command or (sys.executable, "-m", "kernels_metal.trial")
    try:
        child = subprocess.Popen(
            [*start, given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"could not be tried: {error}"
    try:
        said, complained = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"hangs: a try of it did not end within {seconds:.0f} s"
    finally:
        child.kill()  # one that has ended is left alone
        with suppress(subprocess.TimeoutExpired):  # one that waits for the GPU may not end
            child.communicate(timeout=1)
    if child.returncode:
        return f"ends the process with {child.returncode}: {complained.strip()}"
    found = [line for line in said.splitlines() if line.startswith(OUTCOME)]
    if not found:
        return f"ended without an outcome\n{said}{complained}".strip()
    return json.loads(found[-1].removeprefix(OUTCOME))  # type: ignore[no-any-return]


class Watchdog:
    """The verdicts of one machine, kept in `folder`; one that cannot be kept holds for now."""

    def __init__(self, folder: Path, keep: Keep, run: Run = in_child) -> None:
        self._file = file_of(folder)
        self._write, self._run = keep, run
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
