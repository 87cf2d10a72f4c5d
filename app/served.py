"""A server in a process of its own: started, watched by its figures, ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.error import URLError
from urllib.request import Request, urlopen

_ADDRESS = re.compile(r" at (http://\S+:\d+),")
_LINE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PATIENCE = 2.0  # seconds for one look

Counted = Mapping[str, float]  # figures of /metrics by name, those with labels added up


@dataclass(frozen=True)
class Look:
    """What a server had counted at a time, in seconds on any clock."""

    at: float
    counted: Counted

    def of(self, name: str) -> float:
        """A figure, 0 where it is not known."""
        return self.counted.get(f"dflash_{name}", 0.0)

    def share(self, part: str, whole: str) -> float | None:
        """One figure as a share of another; None before there is any."""
        return self.of(part) / self.of(whole) if self.of(whole) else None

    def rate(self, name: str, before: Look) -> float:
        """How much of it came in a second since another look."""
        seconds = self.at - before.at
        return max(0.0, self.of(name) - before.of(name)) / seconds if seconds > 0 else 0.0


class Served:
    """`python -m dflash_mlx.serve` with these words.

    key: what the server asks for. lines: the last that it said on stderr.
    """

    def __init__(self, words: Sequence[str], key: str | None) -> None:
        self.lines: deque[str] = deque(maxlen=200)
        self._key, self._address = key, ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dflash_mlx.serve", *words, "--watched"],
            stdin=subprocess.PIPE,  # whose end it takes for the end of the view
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl+C is for the view, which ends the server in order
        )
        threading.Thread(target=self._listen, name="served", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it is; "" before it listens."""
        return self._address

    def look(self) -> Look | None:
        """Its figures now; None where it does not answer."""
        if not self._address:
            return None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        request = Request(self._address + "/metrics", headers=headers)
        try:
            with urlopen(request, timeout=_PATIENCE) as response:
                page = response.read().decode()
        except (URLError, OSError, ValueError):
            return None
        return Look(time.monotonic(), read_metrics(page))

    def end(self) -> None:
        """Ask it to finish; asked again, at once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            for part in line.rstrip("\n").split("\r"):
                if found := _ADDRESS.search(part):
                    self._address = reachable(found[1])
                if part:
                    self.lines.append(part)


def reachable(address: str) -> str:
    """An address that this machine can ask, where a server listens on all of its addresses."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def read_metrics(page: str) -> dict[str, float]:
    """The figures of a page for Prometheus by name; those that differ in labels are added up."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        found[name] = found.get(name, 0.0) + float(value)
    return found
