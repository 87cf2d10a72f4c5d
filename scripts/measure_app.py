"""What the chat costs: decoding speed inside it, and how soon it reacts to keys while it streams.

Both in a real pseudo-terminal on the default pair; the machine should be idle.

    .venv/bin/python scripts/measure_app.py --pairs 10

Speed: the same prompt in turn inside the app (a new conversation each time, tokens per second of
decoding as saved with the answer) and by `python -m dflash_mlx.generate --json`, in order A B B A;
the ratio of the two medians. Keys: while an answer streams, a letter is typed and the time until it
appears in what the app writes is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from fcntl import ioctl
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
PROMPT = "Janet has 3 apples and buys 5 more. How many apples does she have? Explain in detail."
LETTERS = "žščřďťňľ"  # none of them is in the answer or the app's own texts
COLUMNS, LINES = 120, 40


class App:
    """The chat in a pseudo-terminal; what it writes is only searched, never drawn."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.folder = folder
        self._main, side = pty.openpty()
        ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        command = [sys.executable, "-c", "import dflash_chat.main as m; m.main()"]
        self.process = subprocess.Popen(
            [*command, "--conversations", str(folder), *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(side)

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def read(self, seconds: float) -> bytes:
        """What the app writes within so long, b"" for nothing."""
        if not select.select([self._main], [], [], seconds)[0]:
            return b""
        try:
            return os.read(self._main, 1 << 16)
        except OSError:  # how Linux says that the app has left
            return b""

    def until(self, text: str, most: float = 300.0) -> float:
        """Read until `text` is written; the seconds that took."""
        begin, seen = time.perf_counter(), b""
        while text.encode() not in seen:
            if time.perf_counter() - begin > most:
                raise SystemExit(f"the app did not write {text!r} within {most:.0f} s")
            seen = seen[-200:] + self.read(0.05)
        return time.perf_counter() - begin

    def answer(self) -> float:
        """Ask the prompt in a new conversation; tokens per second as saved with the answer."""
        self.type("/new\r")
        self.quiet()
        before = set(self.folder.glob("*.jsonl"))
        self.type(PROMPT + "\r")
        while not (saved := self._speed(before)):  # seldom: looking costs the app time, too
            self.quiet()
        return saved

    def _speed(self, before: set[Path]) -> float | None:
        for file in set(self.folder.glob("[!.]*.jsonl")) - before:
            last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
            if last.get("figures"):
                return float(last["figures"]["tokens_per_second"])
        return None

    def quiet(self) -> None:
        """Read until nothing comes for half a second."""
        while self.read(0.5):
            pass

    def __enter__(self) -> App:
        self.until("<-")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def generate(options: list[str]) -> float:
    command = [sys.executable, "-m", "dflash_mlx.generate", "--json", "--prompt", PROMPT, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(json.loads(done.stdout)["tokens_per_second"])


def compare_speed(app: App, options: list[str], pairs: int) -> None:
    """Print both medians and their ratio."""
    inside, outside = [], []
    app.answer()  # calibrates and warms up
    for i in range(pairs):
        for side in ("app", "generate") if i % 2 == 0 else ("generate", "app"):
            if side == "app":
                inside.append(app.answer())
            else:
                outside.append(generate(options))
    ratio = median(inside) / median(outside)
    print(f"tokens per second, medians of {pairs}: {median(inside):.2f} in the app,", end=" ")
    print(f"{median(outside):.2f} by dflash_mlx.generate, ratio {ratio:.3f}")


def time_keys(app: App, keys: int) -> None:
    """Print how long typed letters take to appear while answers stream."""
    times: list[float] = []
    while len(times) < keys:
        app.type("/new\r")
        app.quiet()
        app.type(PROMPT + "\r")
        app.until("tok/s")
        for letter in LETTERS:
            time.sleep(0.05)
            app.read(0.0)
            app.type(letter)
            times.append(app.until(letter))
        app.type("\x1b")
        app.until("stopped here")
        app.type("\x7f" * len(LETTERS))
        app.quiet()
    times.sort()
    worst = times[int(0.95 * (len(times) - 1))]
    print(f"key to screen while streaming, {len(times)} keys: median {median(times) * 1e3:.0f} ms,")
    print(f"95 % within {worst * 1e3:.0f} ms, slowest {times[-1] * 1e3:.0f} ms")


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description="What the chat costs.")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--method", default="dflash")
    arguments = parser.parse_args()
    options = ["--max-tokens", str(arguments.tokens), "--method", arguments.method]
    with tempfile.TemporaryDirectory() as folder:
        with App(options, Path(folder)) as app:
            compare_speed(app, options, arguments.pairs)
        with App(["--max-tokens", "4096", "--method", arguments.method], Path(folder)) as app:
            time_keys(app, arguments.keys)


if __name__ == "__main__":
    main()
