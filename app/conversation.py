"""A conversation: what was said, and what each answer cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from dflash_mlx import split_thinking

TITLE_LENGTH = 60
LONGEST_TITLE = 200  # characters of one that the user gives; lists read them whole
UNTITLED = "New conversation"
ENDINGS = {
    "stopped": "stopped here",
    "length": "cut at max tokens; /settings raises it",
    "context": "cut: the context is full; /new begins afresh",
    "failed": "broken off by an error",
}


@dataclass(frozen=True)
class Turn:
    """One message.

    role: "user" or "assistant". ending: why an answer ended, "" for questions. figures: an
    answer's counts and seconds by name, for /stats and scripts.
    """

    role: str
    content: str
    ending: str = ""
    figures: dict[str, Any] | None = None


@dataclass
class Conversation:
    """Turns under a title. created: ISO time, which is also the file's name."""

    created: str = field(default_factory=lambda: now())
    title: str = ""
    model: str = ""
    turns: list[Turn] = field(default_factory=list)

    @property
    def shown_title(self) -> str:
        """The title, or the beginning of the first question."""
        return self.title or title_of(self.turns)

    @property
    def messages(self) -> list[dict[str, str]]:
        """For the chat template."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    @property
    def questions(self) -> list[str]:
        """Everything the user said, oldest first."""
        return [turn.content for turn in self.turns if turn.role == "user"]

    def take_unanswered(self) -> str | None:
        """Remove and return a last question without an answer, as a crash leaves one behind."""
        if self.turns and self.turns[-1].role == "user":
            return self.turns.pop().content
        return None

    def as_markdown(self) -> str:
        """The whole conversation for reading elsewhere, thoughts left out."""
        parts = [f"# {self.shown_title}", f"*{self.created}, {self.model}*"]
        for turn in self.turns:
            name = "You" if turn.role == "user" else "Model"
            parts.append(f"## {name}\n\n{split_thinking(turn.content).answer.strip()}")
        return "\n\n".join(parts) + "\n"


def title_of(turns: Sequence[Turn]) -> str:
    """The first line of the first question, shortened."""
    text = next((turn.content.strip() for turn in turns if turn.role == "user"), "")
    line = text.partition("\n")[0]
    if not line:
        return UNTITLED
    return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 1].rstrip() + "…"


def now() -> str:
    """The time in UTC to the microsecond, sortable and fit for a file name on any system."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S-%f")
