"""Commands that meet Ctrl+C at a moment of their life: when so many modules are imported, or later.

The moment is counted by the program itself, so no clock decides what a test finds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
READY = "dflash_mlx.system.blas"  # imported right behind the first thing that a command does
# As sitecustomize.py, which Python imports before anything of ours.
COUNTER = f"""
import os, signal, sys

class Counter:
    left = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if cls.left is None and name == {READY!r}:
            cls.left = int(os.environ["INTERRUPT_AT"])
        if cls.left is not None:
            cls.left -= 1
            if cls.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Counter)
"""
CHAT = "from dflash_chat.main import main\nmain()\n"


@dataclass(frozen=True)
class End:
    """How a command ended. code: as a shell tells it, where 128 + n is signal n."""

    code: int
    out: str
    err: str

    @property
    def problem(self) -> str:
        """What is not as it should be after Ctrl+C, "" for nothing."""
        others = ("%|", "[transformers]", "step ", "draft vocabulary")  # which are no answer to it
        lines = [line for line in self.err.splitlines() if line]
        lines = [line for line in lines if not any(word in line for word in others)]
        if self.code != 128 + signal.SIGINT:
            return f"exit code {self.code}: {self.err}"
        for word in ("Traceback", "KeyboardInterrupt", "Exception ignored"):
            if word in self.err:
                return self.err
        return "" if len(lines) <= 1 else f"{len(lines)} lines: {self.err}"


def prepare(folder: Path) -> Path:
    """Put the counter and the script `dflash-chat` into `folder`; returns the script."""
    (folder / "sitecustomize.py").write_text(COUNTER)
    script = folder / "dflash-chat"
    script.write_text(CHAT)
    return script


def begin(words: Sequence[object], folder: Path, at: int = 0) -> subprocess.Popen[str]:
    """Start Python with `words`, prepared in `folder`. at: the import to be interrupted at."""
    path = os.pathsep.join(map(str, (folder, ROOT, *filter(None, sys.path))))
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "INTERRUPT_AT": str(at),
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder / "temporary"),
        },
    )


def end_of(process: subprocess.Popen[str], read: str = "") -> End:
    """Wait for the end. read: what was read of its output before."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()  # nothing where it has ended
    code = process.returncode
    return End(128 - code if code < 0 else code, read + out, err)
