"""A conversation: what was said, and what each answer cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from markdown_it import MarkdownIt

from dflash_chat.labels import label_of
from dflash_mlx.client import shown, split_thinking

TITLE_LENGTH = 60
LONGEST_TITLE = 200  # characters of one that the user gives; lists read them whole
UNTITLED = "New conversation"
UNFINISHED = "unfinished"  # the ending of an answer that is saved while it is written
ENDINGS = {  # what an answer ended with; what can be done, as long as it is the last one
    "stopped": "stopped here; /continue goes on",
    "length": f"cut at “{label_of('max_tokens')}” of /settings; /continue goes on",
    "context": "cut: the context is full; /new starts over",
    "failed": "stopped by an error; /continue goes on",
    UNFINISHED: "stopped here; /retry answers again, /continue goes on",
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
    private: bool = False  # never saved, and nothing of it stays

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
        """Remove and return the last questions without an answer, as leaving and crashes leave."""
        questions: list[str] = []
        while self.turns and self.turns[-1].role == "user":
            questions.insert(0, self.turns.pop().content)
        return "\n\n".join(questions) or None

    def before_last_question(self) -> Conversation:
        """A conversation of its own that ends before the last question; this one stays as it is.

        There must be a question.
        """
        last = max(i for i, turn in enumerate(self.turns) if turn.role == "user")
        found = re.fullmatch(r"(.*) \((\d\d?)\)", self.shown_title, re.DOTALL)
        name, number = found.groups() if found else (self.shown_title, 1)
        title = f"{name} ({int(number) + 1})"
        return Conversation(now(), title, self.model, self.turns[:last], self.private)

    @property
    def last_answer(self) -> str | None:
        """The last answer, thoughts left out; None where there is none."""
        answers = (turn.content for turn in reversed(self.turns) if turn.role == "assistant")
        last = next(answers, None)
        return None if last is None else split_thinking(last).answer.strip()

    def as_markdown(self) -> str:
        """The whole conversation for reading elsewhere, thoughts left out."""
        parts = [f"# {self.shown_title}", f"*{self.created}, {self.model}*"]
        for turn in self.turns:
            name = "You" if turn.role == "user" else "Model"
            parts.append(f"## {name}\n\n{shown(split_thinking(turn.content).answer.strip())}")
        return "\n\n".join(parts) + "\n"


def code_blocks(text: str) -> list[str]:
    """The code blocks of a text in Markdown, from the first to the last."""
    kinds = ("fence", "code_block")
    return [part.content for part in MarkdownIt().parse(text) if part.type in kinds]


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
