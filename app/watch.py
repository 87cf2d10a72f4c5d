"""`dflash-serve --watch`: what a server is doing, on the terminal."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.filter import LineFilter
from textual.widgets import Digits, Footer, Static

from dflash_chat.figures import counted, sparkline, speed
from dflash_chat.served import Look, Served
from dflash_chat.terminal import Harmless, when_hung_up
from dflash_chat.themes import DARK, LIGHT
from dflash_mlx.cli import options as cli
from dflash_mlx.client import amount
from dflash_mlx.serve import command

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
        "done": f"{counted(answers, 'answer')}, {tokens} tokens",
        "drafts": "" if extra is None else f"{1 + extra:.2f} tokens per round",
        "accepted": "" if accepted is None else f"{accepted:.0%} of drafted positions",
        "first token": "" if first is None else f"after {first:.2f} s on average",
        "from caches": "" if cached is None else f"{cached:.0%} of the prompts' tokens",
        "memory": f"{amount(look.of('memory_bytes'))}, {caches} of it caches",
    }
    return [f"{name:<14} {told}" for name, told in shown.items() if told]
