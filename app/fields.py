"""Fields to type into that take every key in the order in which it was pressed."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import Input

from dflash_mlx.client import for_terminal


def own_keys(bindings: Iterable[BindingType]) -> dict[str, str]:
    """What a field's own keys do. Textual runs them after letters that came later: call them."""
    bound = [binding for binding in bindings if isinstance(binding, Binding)]
    return {key: binding.action for binding in bound for key in binding.key.split(",")}


def as_typed(event: events.Event) -> events.Event:
    """Joiners and marks of direction as a paste: Textual takes only what has a shape for typed."""
    character = event.character if isinstance(event, events.Key) else None
    if character and unicodedata.category(character) == "Cf" and for_terminal(character):
        return events.Paste(character)
    return event


class TextField(Input):
    """An `Input` that takes every key in the order in which it was pressed."""

    _KEYS = own_keys(Input.BINDINGS)

    async def _on_key(self, event: events.Key) -> None:
        if event.key in self._KEYS:
            event.stop()
            event.prevent_default()
            await self.run_action(self._KEYS[event.key])
