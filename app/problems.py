"""What went wrong, in a sentence with the next step."""

from __future__ import annotations

import re
from dataclasses import fields

from dflash_chat.commands import COMMANDS
from dflash_chat.labels import label_of
from dflash_mlx.cli.options import in_short, keep_traceback
from dflash_mlx.client import DecodeConfig, DFlashError, SamplingConfig, own_options

_FULL = ("unable to allocate", "out of memory", "insufficient memory", "malloc")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")  # not the dashes inside of a name
_REWORDED = {
    "pass --model with": "give /model",
    "add --raw to send plain text": "choose another /model, one that was trained to chat",
}


def describe(error: Exception) -> str:
    """The sentence; a fault of ours also leaves its traceback in a file.

    What a command line calls an option is a slash command or a setting here.
    """
    if isinstance(error, DFlashError):
        sentence = error.told(label_of)
        for ours, here in _REWORDED.items():
            sentence = sentence.replace(ours, here)
        return _OPTION.sub(_in_chat, sentence)
    reason = in_short(error)
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _FULL):
        step = "begin a /new conversation, or choose a smaller or a quantised /model"
        return f"there is not enough memory ({reason}); close other programs, {step}"
    log = keep_traceback(error)
    return f"something went wrong ({reason}); try again, and report it with {log} if it stays"


def _in_chat(option: re.Match[str]) -> str:
    """What stands for an option of the command line; one for the start alone stays as it is."""
    name = option[1]
    if any(command.name == name for command in COMMANDS):
        return f"/{name}"
    setting = name.replace("-", "_")
    kinds = DecodeConfig, SamplingConfig, own_options()
    known = {field.name for kind in kinds for field in fields(kind)}
    return f"“{label_of(setting)}” in /settings" if setting in known else option[0]
