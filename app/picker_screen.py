"""Choosing a model from a list, or typing its name."""

from __future__ import annotations

from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from dflash_chat import memory
from dflash_chat.picker import Candidate, candidates
from dflash_chat.screens import Dialog
from dflash_mlx import PairConfig


class PickerScreen(Dialog[PairConfig | None]):
    """Gives the pair to load, None when none was chosen."""

    BINDINGS = [("escape", "leave", "Leave")]

    def __init__(self) -> None:
        super().__init__()
        self._candidates: list[Candidate] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "Models"
            dialog.border_subtitle = "Enter loads, Tab goes on to typing a name, Esc leaves"
            yield OptionList(markup=False)
            yield Input(placeholder="a Hugging Face id like owner/name, or a folder", compact=True)

    def on_mount(self) -> None:
        self.query_one(OptionList).loading = True
        self.run_worker(self._find, thread=True)

    def _find(self) -> None:
        """On a thread: a large cache takes a while to list."""
        found, there = candidates(Path()), memory.available()
        self.app.call_from_thread(self._show, found, there)

    def _show(self, found: list[Candidate], there: int) -> None:
        if not self.is_active:  # the user did not wait
            return
        self._candidates = found
        options = self.query_one(OptionList)
        options.loading = False
        options.add_options([Option(candidate.line(there)) for candidate in found])
        options.highlighted = 0
        options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._candidates[event.option_index].config)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(PairConfig(model=event.value.strip()))

    def action_leave(self) -> None:
        self.dismiss(None)
