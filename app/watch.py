"""`dflash-serve --watch`: a server in a process of its own, and what it does, on the terminal."""

from __future__ import annotations

import asyncio
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

from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.filter import LineFilter
from textual.widgets import Digits, Footer, Static

from dflash_chat.figures import sparkline, speed
from dflash_chat.terminal import Harmless, when_hung_up
from dflash_chat.themes import DARK, LIGHT
from dflash_mlx.cli import options as cli
from dflash_mlx.client import amount, counted
from dflash_mlx.serve import command

_ADDRESS = re.compile(r" at (http://\S+:\d+),")
_LINE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PATIENCE = 2.0  # seconds for one look
_PAUSE = 0.5  # seconds between looks
_KEPT = 60  # speeds in the line


def watch(argv: Sequence[str]) -> None:
    """Start a server and show it; DFlashError for options that it would refuse."""
    config = command.read_serve_config(command.parser().parse_args(argv))
    served = Served(argv, config.key)
    app = WatchApp(served)
    app.run()
    served.end()
    code = served.process.wait()
    for line in list(served.lines)[-3:] if code else ():
        cli.say(line)
    cli.end_program(code)


@dataclass(frozen=True)
class Look:
    """What a server had counted at a time."""

    at: float  # seconds on any clock
    counted: Mapping[str, float]  # figures of /metrics by name, those with labels added up

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
    """`python -m dflash_mlx.serve` with these words."""

    def __init__(self, words: Sequence[str], key: str | None) -> None:
        self.lines: deque[str] = deque(maxlen=200)  # the last that it said on stderr
        self.address = ""  # where it is; "" before it listens
        self._key = key  # that it asks for
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

    def look(self) -> Look | None:
        """Its figures now; None where it does not answer."""
        if not self.address:
            return None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        request = Request(self.address + "/metrics", headers=headers)
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
                    self.address = reachable(found[1])
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


class WatchApp(App[None]):
    """Figures of a server, twice a second; the lines that it says below them."""

    CSS = """
    #name { padding: 0 1; background: $panel; text-style: bold; }
    #now { height: 3; margin: 1 1 0 1; }
    #now Digits { width: auto; min-width: 10; color: $text-primary; text-align: right; }
    #now Static { margin: 2 0 0 1; }
    #speeds, #figures { padding: 0 2; margin: 1 0 0 0; }
    #speeds { color: $text-primary; }
    #said { height: 1fr; padding: 0 2; margin: 1 0 0 0; color: $text-muted; }
    """
    BINDINGS = [("ctrl+q", "leave", "end the server"), ("ctrl+c", "leave", "end the server")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._served = served
        self._looks: deque[Look] = deque(maxlen=2)
        self._speeds: deque[float] = deque(maxlen=_KEPT)
        self._leaving, self._harmless = False, Harmless()

    def compose(self) -> ComposeResult:
        yield Static("dflash-serve is loading", id="name", markup=False)
        with Horizontal(id="now"):
            yield Digits("0.0")
            yield Static("tok/s, all answers together", markup=False)
        yield Static(id="speeds", markup=False)
        with Vertical():
            yield Static(id="figures", markup=False)
            yield Static(id="said", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = DARK.name
        when_hung_up(self.exit)
        self.run_worker(self._look_on(), exclusive=True)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Nothing that a server says commands the terminal."""
        return [self._harmless, *super().get_line_filters()]

    def action_leave(self) -> None:
        """End the server; the view goes with it."""
        self._served.end()
        self._leaving = True

    async def _look_on(self) -> None:
        while self._served.process.poll() is None:
            look = await asyncio.to_thread(self._served.look)
            if look is not None:
                self._looks.append(look)
            self._draw()
            await asyncio.sleep(_PAUSE)
        self.exit()

    def _draw(self) -> None:
        address = self._served.address
        state = "ends when its answers are over" if self._leaving else address or "is loading"
        self.query_one("#name", Static).update(f"dflash-serve  {state}")
        self.query_one("#said", Static).update("\n".join(list(self._served.lines)[-8:]))
        if len(self._looks) == 2:
            before, now = self._looks
            self._speeds.append(now.rate("tokens_total", before))
            self.query_one(Digits).update(speed(self._speeds[-1]))
            shown = sparkline([*self._speeds], min(_KEPT, self.size.width - 30))
            self.query_one("#speeds", Static).update(f"{shown} up to {speed(max(self._speeds))}")
            self.query_one("#figures", Static).update("\n".join(rows(now)))


def rows(look: Look) -> list[str]:
    """What a server does and has done, a line for each."""
    waiting, caches = int(look.of("waiting")), amount(look.of("cache_bytes"))
    accepted = look.share("accepted_total", "drafted_total")
    extra = look.share("accepted_total", "rounds_total")
    cached = look.share("cached_tokens_total", "prompt_tokens_total")
    first = look.share("first_token_seconds_sum", "first_token_seconds_count")
    answers, tokens = int(look.of("answers_total")), int(look.of("tokens_total"))
    shown = {
        "in the making": f"{counted(int(look.of('decoding')), 'answer')}, {waiting} waiting",
        "done": f"{counted(answers, 'answer')}, {counted(tokens, 'token')}",
        "drafts": "" if extra is None else f"{1 + extra:.2f} tokens per round",
        "accepted": "" if accepted is None else f"{accepted:.0%} of drafted positions",
        "first token": "" if first is None else f"after {first:.2f} s on average",
        "from caches": "" if cached is None else f"{cached:.0%} of the prompts' tokens",
        "memory": f"{amount(look.of('memory_bytes'))}, {caches} of it caches",
    }
    return [f"{name:<14} {told}" for name, told in shown.items() if told]
