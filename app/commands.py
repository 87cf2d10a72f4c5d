"""The slash commands: one table for the input line, the command palette and /help."""

from __future__ import annotations

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
    Command("draft", "", "show who guessed each token, or hide it"),
    Command("stats", "", "all figures of the last answer"),
    Command("retry", "", "answer the last question again; the old answer stays in /open"),
    Command("continue", "", "let the model write on where its last answer was cut or stopped"),
    Command("edit", "", "change the last question; what followed stays in /open"),
    Command("copy", "[number]", "copy the last answer, or one of its code blocks; code: the last"),
    Command("new", "", "begin a new conversation"),
    Command("incognito", "", "begin one that is not saved, and of which nothing stays"),
    Command("forget", "", "clear what speeds up later answers; conversations stay in /open"),
    Command("open", "", "earlier conversations: search, open, rename, delete"),
    Command("rename", "title", "name this conversation"),
    Command("delete", "", "delete this conversation"),
    Command("share", "[file]", "draw the last answer as a picture that others can see"),
    Command("export", "[file]", "write this conversation as Markdown"),
    Command("theme", "[name]", "light or dark; without a name the other one"),
    Command("help", "", "commands and keys"),
    Command("quit", "", "leave; everything said is saved"),
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
