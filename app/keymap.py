"""The user's own keys for commands, from the table `keys` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.widgets import TextArea

from dflash_chat.commands import COMMANDS
from dflash_chat.fields import own_keys
from dflash_chat.prompt import Prompt
from dflash_mlx.client import DFlashError

_KEY = re.compile(r"f\d+|((ctrl|alt|shift|super)\+)+\w+")


def rebind(app: App[Any], keys: Mapping[str, str]) -> None:
    """Run commands by these keys; DFlashError for an unknown one, and keys that are taken."""
    known = [command.name for command in COMMANDS]
    bound = [each for each in app.BINDINGS if isinstance(each, Binding)]
    taken = dict.fromkeys([*own_keys(TextArea.BINDINGS), *own_keys(Prompt.BINDINGS)], "typing")
    taken |= {"ctrl+j": "typing", "ctrl+p": "the palette", "ctrl+q": "quit"}
    taken |= {k: b.id or b.action for b in bound if b.id not in keys for k in b.key.split(",")}
    for name, typed in keys.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            step = f"did you mean {near[0]}?" if near else f"write one of {', '.join(known)}"
            raise DFlashError(f"{name} is not a command", step, f"keys.{name}")
        for key in typed.split(","):
            if not _KEY.fullmatch(key):
                raise DFlashError(f"{name} is {key!r}", "write f5 or ctrl+e, say", f"keys.{name}")
            if key in taken:
                what = f"{name} is {key!r}, which is for {taken[key]}"
                raise DFlashError(what, "choose another key", f"keys.{name}")
            taken[key] = name
        if not any(each.id == name for each in bound):
            app.bind(typed, f"call('{name}')", show=False)
    app.set_keymap(keys)
