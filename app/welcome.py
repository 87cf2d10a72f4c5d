"""What an empty conversation shows: what is loaded, what it does here, and how to begin."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import date

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from dflash_chat.figures import counted, gigabytes, speed
from dflash_chat.naming import method_name, target_name
from dflash_chat.speeds import Earlier, SpeedLog, Timing
from dflash_mlx import DecodeConfig, Pair, settle

QUESTIONS = (
    "Write a Python function that says whether a number is prime.",
    "Janet has 3 apples and buys 5 more. How many does she have? Explain.",
    "Why is the sky blue?",
)
CLAIM = (
    "A small model guesses the next words, the large model checks all of them in one pass. Only "
    "words that it would have chosen itself are kept: faster, and nothing is traded for it."
)
MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
KEYS = "Enter sends · Ctrl+J new line · Esc stops · F2 where tokens come from · F3 figures · /help"


@dataclass(frozen=True)
class Facts:
    """Lines of the first screen, "" for what is not known."""

    model: str = ""
    drafts: str = ""
    memory: str = ""
    here: str = ""


class Sample(Static):
    """A question to begin with."""

    @dataclass
    class Picked(Message):
        """The user clicked on a question."""

        text: str

    def __init__(self, number: int, question: str) -> None:
        self._question = question
        super().__init__(
            Content.assemble((f" {number} ", "bold $text-primary"), " ", question),
            classes="sample",
        )

    def on_click(self) -> None:
        self.post_message(self.Picked(self._question))


class Welcome(Vertical):
    """The first screen.

    memory: bytes that the loaded pair takes, 0 for unknown. told: whether earlier speeds, if there
    are any, are shown.
    """

    def __init__(self) -> None:
        super().__init__(id="welcome")
        self.memory, self.timing, self.told = 0, Timing(), False
        self._facts = Facts()

    def compose(self) -> ComposeResult:
        yield Static("dflash-chat", id="name", markup=False)
        yield Static(CLAIM, id="claim", markup=False)
        yield Static(id="facts")
        yield Static("Try one: type its number and Enter, or click it.", id="try", markup=False)
        for number, question in enumerate(QUESTIONS, start=1):
            yield Sample(number, question)
        yield Static(KEYS, id="keys", markup=False)

    def question(self, typed: str) -> str:
        """The question whose number was typed while this is shown, else what was typed."""
        numbers = {str(i): question for i, question in enumerate(QUESTIONS, start=1)}
        return numbers.get(typed.strip(), typed) if self.display else typed

    def tell(self, pair: Pair | None, config: DecodeConfig, log: SpeedLog) -> None:
        """Show what is known of a pair; its earlier speeds are looked up aside."""
        if not self.display:
            return
        if pair is None:
            self._say(Facts(model="not loaded yet"))
            return
        method = settle(config, pair.means).method
        facts = Facts(target_name(pair), method_name(method, pair.means.drafters))
        if self.memory:
            facts = replace(facts, memory=f"{gigabytes(self.memory)} in use")
        self.told = False
        self._say(replace(facts, here=self._facts.here))
        self._look_up(facts, log, pair.target.name, method)

    @work(exclusive=True)
    async def _look_up(self, facts: Facts, log: SpeedLog, model: str, method: str) -> None:
        earlier = await asyncio.to_thread(log.earlier, model, method)
        self._say(replace(facts, here=speed_here(earlier, self.timing)))
        self.told = True

    def _say(self, facts: Facts) -> None:
        self._facts = facts
        rows = [
            ("Model", facts.model, ""),
            ("Drafts", facts.drafts, ""),
            ("Memory", facts.memory, ""),
            ("Speed", facts.here, "bold $text-primary"),
        ]
        lines = [
            Content.assemble((f"{name:<8}", "$secondary"), (said, style))
            for name, said, style in rows
            if said
        ]
        self.query_one("#facts", Static).update(Content("\n").join(lines))


def speed_here(earlier: Earlier | None, timing: Timing) -> str:
    """What this machine does, by the last answers, else by timed passes; "" without a ground."""
    if earlier is not None:
        ratio = f", ~{earlier.times_plain:.1f}x plain decoding" if earlier.times_plain else ""
        ground = f"last {counted(earlier.answers, 'answer')}, {day_in_words(earlier.day)}"
        return f"~{speed(earlier.tokens_per_second)} tokens per second{ratio} ({ground})"
    if timing.plain and timing.day:
        day = day_in_words(timing.day)
        return f"~{speed(timing.plain)} tokens per second without drafts (timed {day})"
    return ""


def day_in_words(day: str) -> str:
    """A date like "2026-11-22" for people, in every locale alike."""
    known = date.fromisoformat(day)
    return f"{known.day} {MONTHS[3 * known.month - 3 : 3 * known.month]} {known.year}"
