"""What an empty conversation shows: what is loaded, what it does here, and how to begin."""

from __future__ import annotations

from datetime import date

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_chat.aside import Asks, aside
from dflash_chat.figures import LEAST_RATIO, counted, speed
from dflash_chat.naming import method_name, short_name
from dflash_chat.prompt import Prompt
from dflash_chat.speeds import Earlier, SpeedLog, Timing
from dflash_chat.terminal import assembled
from dflash_mlx.client import DecodeConfig, Pair, amount, settle

# The default model answers these right: docs/lab/2026-11-26-welcome-questions.md.
QUESTIONS = (
    "Write a Python function that says whether two words are anagrams.",
    "What is gravity?",
    "Rewrite in the past tense: She walks to school and meets her friends.",
)
CLAIM = (
    "A small model guesses the next words (drafts), the large model checks all of them in one pass "
    "(a round). Only words that it would have chosen itself are kept. That is faster than one pass "
    "for each word (plain decoding), and the answer stays the same."
)
SPEED = "Speed"
MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"


class Sample(Static):
    """A question to begin with; a click puts it into the line of input."""

    def __init__(self, number: int, question: str) -> None:
        self._question = question
        told = Content.assemble((f" {number} ", "bold $text-primary"), " ", question)
        super().__init__(told, classes="sample")

    def on_click(self) -> None:
        prompt = self.app.query_one(Prompt)
        prompt.put(self._question)
        prompt.focus()


class Welcome(Asks, Vertical):
    """The first screen.

    memory: bytes that the loaded pair takes, 0 for unknown. told: whether earlier speeds, if there
    are any, are shown.
    """

    def __init__(self) -> None:
        super().__init__(id="welcome")
        self.memory, self.timing, self.told = 0, Timing(), False
        self._facts: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        yield Static("dflash-chat", id="name", markup=False)
        yield Static(CLAIM, id="claim", markup=False)
        yield Static(id="facts")
        yield Static(id="offer", markup=False)
        yield Static("Try one: type its number and Enter, or click it.", id="try", markup=False)
        for number, question in enumerate(QUESTIONS, start=1):
            yield Sample(number, question)

    def question(self, typed: str) -> str:
        """The question whose number was typed while this is shown, else what was typed."""
        numbers = {str(i): question for i, question in enumerate(QUESTIONS, start=1)}
        return numbers.get(typed.strip(), typed) if self.display else typed

    def offer(self, text: str) -> None:
        self.query_one("#offer", Static).update(text)
        self.query_one("#offer").display = True

    def tell(self, pair: Pair | None, config: DecodeConfig, log: SpeedLog) -> None:
        """Show what is known of a pair; its earlier speeds are looked up aside."""
        if not self.display:
            return
        if pair is None:
            self._say({"Model": "not loaded yet"})
            return
        name, method = pair.target.name, settle(config, pair.capabilities).method
        facts = {
            "Model": short_name(pair.target.name),
            "Drafts": method_name(method, pair.capabilities),
            "Memory": f"{amount(self.memory)} in use" if self.memory else "",
            SPEED: self._facts.get(SPEED, ""),
        }
        self.told = False
        self._say(facts)
        self.hear(aside(lambda: log.earlier(name, method)), lambda found: self._know(facts, found))

    def _know(self, facts: dict[str, str], earlier: Earlier | None) -> None:
        if facts is self._facts:  # else something else was told meanwhile
            self._say({**facts, SPEED: speed_here(earlier, self.timing)})
            self.told = True

    def _say(self, facts: dict[str, str]) -> None:
        self._facts = facts
        rows = ([(f"{name:<8}", "$secondary"), (said, "bold $text-primary" * (name == SPEED))]
                for name, said in facts.items() if said)  # fmt: skip
        lines = map(assembled, rows)
        self.query_one("#facts", Static).update(Content("\n").join(lines))


def speed_here(earlier: Earlier | None, timing: Timing) -> str:
    """What this machine does, by the last answers, else by timed passes; "" without a ground."""
    if earlier is not None:
        told = earlier.times_plain >= LEAST_RATIO
        ratio = f", ~{earlier.times_plain:.1f}x plain decoding" if told else ""
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
