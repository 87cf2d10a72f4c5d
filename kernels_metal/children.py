"""A process of its own for work that may hang the GPU, or end whoever does it: line by line.

The parent writes what to do as a line of JSON and reads what came of it, behind a mark: all else
that a child prints is another program's noise.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

OUTCOME = "outcome: "


class Gone(Exception):
    """A child that hung, ended or was never there; says what it complained of."""


class Child:
    """A process that answers lines. The terminal's Ctrl+C, no fault of a kernel, does not reach it.

    Raises Gone where it cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._unread, self._noise = b"", ""
        try:
            self._process = subprocess.Popen(
                [*command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._complaints.close()
            raise Gone(f"could not be tried: {error}") from None

    def ask(self, given: Any, seconds: float) -> Any:
        """What came of it. Raises Gone where nothing did within `seconds`."""
        if not (self._process.stdin and self._process.stdout):
            raise Gone("has no pipes")
        with suppress(OSError):  # one that has ended says so below
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                for line in self._lines():
                    if line.startswith(OUTCOME):
                        with suppress(ValueError):  # another program's words
                            return json.loads(line.removeprefix(OUTCOME))
                    self._noise = f"{self._noise}{line}\n"[-4000:]
                left = end - time.monotonic()
                if left < 0 or not ready.select(left):
                    raise Gone(f"hangs: a try of it did not end within {seconds:.0f} s")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise Gone(self._last_words())
                self._unread += read

    def kill(self) -> None:
        """End it, and leave its pipes to whoever reads them."""
        self._process.kill()

    def close(self) -> None:
        """End it; one that has ended is left alone, one that waits for the GPU may not end."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            if pipe is not None:
                pipe.close()

    def _lines(self) -> Iterator[str]:
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            yield line.decode("utf-8", "replace")

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._complaints.seek(0)
        complained = self._complaints.read().decode("utf-8", "replace")
        if self._process.returncode:
            return f"ends the process with {self._process.returncode}: {complained.strip()}"
        rest = self._noise + self._unread.decode("utf-8", "replace")
        return f"ended without an outcome\n{rest}{complained}".strip()


class Children:
    """One child for all that is asked, and another after one that is gone.

    wanted: whether to start it now, so that it is ready when it is asked.
    """

    def __init__(self, command: Sequence[str], wanted: bool = False) -> None:
        self._command = command
        self._child: Child | None = None
        if wanted:
            with suppress(Gone):
                self._child = Child(command)

    def ask(self, given: Any, seconds: float) -> Any:
        """As `Child.ask`."""
        try:
            self._child = self._child or Child(self._command)
            return self._child.ask(given, seconds)
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """From another thread: whoever asks now is told that the child is gone."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.close()
        self._child = None


def answer(work: Callable[[Any], Any], seconds: Callable[[Any], float]) -> None:
    """In the child: do what is asked until nobody asks.

    seconds: for one piece; a child whose parent is gone and cannot end it ends by itself.
    """
    for line in sys.stdin:
        given = json.loads(line)
        signal.alarm(int(seconds(given)) + 1)
        found = work(given)
        signal.alarm(0)
        print(f"\n{OUTCOME}{json.dumps(found)}", flush=True)  # behind noise that ends no line
