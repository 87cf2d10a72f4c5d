"""The slash commands: one table for the input line, the command palette and /help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from dflash_mlx.client import DFlashError


@dataclass(frozen=True)
class Command:
    """One command. name: without the slash. argument: as shown in help, [x] when optional."""

    name: str
    argument: str
    help: str

    @property
    def usage(self) -> str:
        """As typed."""
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def needs_argument(self) -> bool:
        """Whether it does nothing alone."""
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = (
    Command("model", "[name]", "choose a model, or load a Hugging Face id or a local folder"),
    Command("drafter", "name", "load the model again with this drafter"),
    Command("method", "[name]", "how tokens are drafted; none is plain decoding"),
    Command("temperature", "[number]", "0 is greedy, higher is more random"),
    Command("system", "[text]", "the system prompt; - removes it"),
    Command("settings", "", "all settings of decoding and sampling"),
    Command("race", "[question]", "decode plainly and with drafts, side by side"),
    Command(
        "bench", "[methods]", "a dozen prompts with every method: which is fastest on this machine"
    ),
    Command("draft", "", "show who guessed each token, or hide it"),
    Command("stats", "", "all figures of the last answer"),
    Command("retry", "", "answer the last question again; the old answer stays in /open"),
    Command("edit", "", "change the last question; what followed stays in /open"),
    Command("copy", "[number]", "copy the last answer, or one of its code blocks"),
    Command("new", "", "begin a new conversation"),
    Command("open", "", "earlier conversations: search, open, rename, delete"),
    Command("rename", "title", "name this conversation"),
    Command("delete", "", "delete this conversation"),
    Command("share", "[file]", "draw the last answer as a picture that others can see"),
    Command("export", "[file]", "write this conversation as Markdown"),
    Command("theme", "", "light or dark"),
    Command("help", "", "commands and keys"),
    Command("quit", "", "leave; everything said is saved"),
)
KEYS = (
    ("Enter", "send"),
    ("Ctrl+J", "new line; Shift+Enter, too, where the terminal can tell it from Enter"),
    ("Esc, Ctrl+C", "stop the answer, keeping what was said"),
    ("Tab", "complete a command"),
    ("@file", "in a question: the text of the file goes with it"),
    ("Up, Down", "earlier questions; Up first takes back those that wait"),
    ("PageUp, PageDown", "scroll"),
    ("F2, Ctrl+T", "draft view: Tab, then Left and Right, goes through its rounds"),
    ("F3, Ctrl+G", "figures of the last answer, and what they mean"),
    ("F4, Ctrl+R", "race: the last question plainly and with drafts, side by side"),
    ("mouse, Ctrl+C", "select and copy; with Fn (Terminal.app) or Option (iTerm2) its own way"),
    ("Ctrl+Z, Ctrl+_", "suspend (fg goes on); undo what was typed"),
    ("Ctrl+P", "command palette"),
    ("Ctrl+Q", "leave"),
)
ALIASES = {"/exit": "/quit", "exit": "/quit", ":q": "/quit", "/clear": "/new", "/?": "/help"}
_BY_NAME = {command.name: command for command in COMMANDS}


@dataclass(frozen=True)
class Call:
    """A command with what was typed behind it."""

    command: Command
    argument: str


def parse(line: str) -> Call | None:
    """The command in `line`, None when it is a message to the model.

    A slash begins a command only as the first character of a single line whose first word looks
    like a name, so paths and code can be sent. Raises DFlashError for an unknown command, with
    near matches, and for a missing argument.
    """
    line = ALIASES.get(line.strip().lower(), line)
    word, _, argument = line.strip().partition(" ")
    if not word.startswith("/") or not word[1:].isalpha() or "\n" in line.strip():
        return None
    command = _BY_NAME.get(word[1:].lower())
    if command is None:
        near = get_close_matches(word[1:].lower(), _BY_NAME, n=2, cutoff=0.6)
        meant = " or ".join(f"/{name}" for name in near) or "/help, which lists all"
        raise DFlashError(f"there is no command {word}", f"try {meant}")
    if command.needs_argument and not argument.strip():
        raise DFlashError(f"/{command.name} needs more", f"type {command.usage}")
    return Call(command, argument.strip())


def completions(typed: str) -> list[Command]:
    """The commands that `typed` is a beginning of; none where it is no command in the making."""
    if not re.fullmatch("/[A-Za-z]*", typed):
        return []
    return [c for c in COMMANDS if c.name.startswith(typed[1:].lower())]


def help_rows() -> list[tuple[str, str]]:
    """All commands and keys, each with what it does."""
    return [*((command.usage, command.help) for command in COMMANDS), ("", ""), *KEYS]
