"""The user's own keys for commands, from the table `keys` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from textual.app import App
from textual.widgets import TextArea

from dflash_chat.commands import COMMANDS
from dflash_chat.fields import own_keys
from dflash_chat.prompt import Prompt
from dflash_mlx.client import DFlashError

_KEY = re.compile(r"f([1-9]|1\d|2[0-4])|((ctrl|alt|shift|super)\+)+\w+")


def rebind(app: App[Any], keys: Mapping[str, str]) -> None:
    """Run commands by these keys; DFlashError for an unknown one, and a key that cannot be."""
    known, others = [c.name for c in COMMANDS], [*TextArea.BINDINGS, *Prompt.BINDINGS]
    ours = {getattr(binding, "id", None): binding for binding in app.BINDINGS}
    rest = (b for b in app.BINDINGS if getattr(b, "id", None) not in keys)
    taken = {*own_keys([*others, *App.BINDINGS, *rest]), "ctrl+j", "ctrl+p"}
    for name, typed in keys.items():
        if name not in known:
            near = get_close_matches(name, known, n=1) or known
            raise DFlashError(f"{name} is not a command", f"write {', '.join(near)}", name)
        for key in typed.split(","):
            if key in taken or not _KEY.fullmatch(key):
                step = "choose one like f5 or ctrl+n that nothing else has"
                raise DFlashError(f"{name} is {key!r}", step, name)
            taken.add(key)
        if name not in ours:
            app.bind(typed, f"call('{name}')", show=False)
    app.set_keymap(keys)
