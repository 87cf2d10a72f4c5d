"""Kernels are tried in a child process first, and what came of it is remembered.

A verdict holds for a machine, these sources and this MLX. A try that never ended may have been left
with its program, or have taken the machine down: it is made once more, and no third time.
"""

from __future__ import annotations

import atexit
import json
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # reading a file of ours
Run = Callable[[str], str]  # of what to try, as JSON: what is wrong with it, "" for nothing
IDLE = 20.0  # seconds after which the process that tries is ended
TRYING = "it is being tried in a process of its own"
COMMAND = (sys.executable, "-m", "kernels_metal.trial")


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel may run in this process, and why not."""

    safe: bool
    reason: str


class Background:
    """Does one thing after the other in a thread of its own. idle: for when all has been done."""

    def __init__(self, idle: Callable[[], None]) -> None:
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._keys: set[str] = set()
        self._idle = idle
        threading.Thread(target=self._run, daemon=True).start()

    def do(self, key: str, work: Callable[[], None]) -> None:
        """Do it behind all else, each key once."""
        if key not in self._keys:
            self._keys.add(key)
            self._work.put(work)

    def is_busy(self) -> bool:
        """Whether something is not done yet."""
        return self._work.unfinished_tasks > 0

    def wait(self, seconds: float) -> None:
        """Until all is done, but no longer."""
        with self._work.all_tasks_done:
            self._work.all_tasks_done.wait_for(lambda: not self.is_busy(), seconds)

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=IDLE)
            except queue.Empty:
                self._idle()
                continue
            with suppress(Exception):  # what was not found is not known
                work()
            self._work.task_done()


class Trials:
    """Tries kernels in a process of its own, one behind the other. wanted: start it now."""

    def __init__(
        self, command: Sequence[str] = COMMAND, seconds: float = SECONDS, wanted: bool = False
    ) -> None:
        self._children, self._seconds, self._over = Children(command, wanted), seconds, False

    def __call__(self, given: str) -> str:
        """What is wrong, "" for nothing. Raises Gone from `end` on."""
        if self._over:
            raise Gone("the program ends")
        try:
            return str(self._children.ask(json.loads(given), self._seconds))
        except Gone as gone:
            if self._over:
                raise
            return str(gone)

    def rest(self) -> None:
        """Do without the process until something is to be tried."""
        self._children.close()

    def end(self) -> None:
        """From another thread: what is being tried is left, and is no kernel's fault."""
        self._over = True
        self._children.kill()


class Watchdog:
    """The verdicts of one machine, kept in `folder`; one that cannot be kept holds for now.

    later: what tries in the background; until it has the answer is TRYING.
    """

    def __init__(
        self, folder: Path, keep: Keep, run: Run | None = None, later: Trials | None = None
    ) -> None:
        self._file = file_of(folder)
        self._write, self._run = keep, run or later or Trials()
        self._report = Faults(folder / "faults", keep).report
        self._found: dict[str, Verdict] = {}  # here; others may add to the file meanwhile
        self._later: Background | None = None
        self.settled = 0  # verdicts from the background so far
        if later is not None:
            self._later = Background(later.rest)
            atexit.register(self._end, later)

    def refusal(self, operation: Operation, args: Arguments) -> str:
        """Why the operation's kernels are not to run here with such arguments, "" if they may."""
        if not operation.kernels:  # MLX's own on both sides
            return ""
        variant, sizes = operation.tried(*args)
        dtype = operation.case(*args)[3].partition("+")[0]
        key = "/".join(part for part in (operation.name, variant, dtype) if part)
        if key not in self._found:
            kept = read_verdicts(self._file).get(key)
            given = json.dumps({"operation": operation.name, "dtype": dtype, "sizes": sizes})
            if kept is not None and kept.reason != _BEGUN:
                self._found[key] = kept
            elif self._later is None:
                self._found[key] = self._try(key, given, kept)
            else:
                self._later.do(key, lambda: self._settle(key, given, kept))
                return TRYING
        verdict = self._found[key]
        return "" if verdict.safe else f"in a trial process: {verdict.reason}"

    def is_trying(self) -> bool:
        """Whether something is tried in the background."""
        return self._later is not None and self._later.is_busy()

    def wait(self, seconds: float) -> None:
        """Until nothing is tried any more, but no longer."""
        if self._later is not None:
            self._later.wait(seconds)

    def _end(self, trials: Trials) -> None:
        """When the program ends: what is being tried has not begun."""
        if self.is_trying():
            trials.end()
            self.wait(1.0)

    def _settle(self, key: str, given: str, before: Verdict | None) -> None:
        self._found[key] = self._try(key, given, before)
        self.settled += 1

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
    except DAMAGED:
        return {}
    return found if good else {}
