"""Choosing a model from a list, or typing its name."""

from __future__ import annotations

from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from dflash_chat.figures import gigabytes
from dflash_chat.screens import Dialog
from dflash_mlx import AvailableModel, PairConfig, available_memory, available_models


class PickerScreen(Dialog[PairConfig | None]):
    """Gives the pair to load, None when none was chosen."""

    BINDINGS = [("escape", "leave", "Leave")]

    def __init__(self) -> None:
        super().__init__()
        self._models: list[AvailableModel] = []

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
        found, there = available_models(Path()), available_memory()
        self.app.call_from_thread(self._show, found, there)

    def _show(self, found: list[AvailableModel], there: int) -> None:
        if not self.is_active:  # the user did not wait
            return
        self._models = found
        options = self.query_one(OptionList)
        options.loading = False
        options.add_options([Option(line(model, there)) for model in found])
        options.highlighted = 0
        options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._models[event.option_index].config)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(PairConfig(model=event.value.strip()))

    def action_leave(self) -> None:
        self.dismiss(None)


def line(model: AvailableModel, there: int) -> str:
    """What a model is, its drafter, and the memory it needs against the memory that is there."""
    parts = [part for part in (model.name, model.place, model.drafter, model.notes) if part]
    if model.needs:
        fits = "" if model.needs <= there else ", does not fit"
        parts.append(f"needs {gigabytes(model.needs)} of {gigabytes(there)}{fits}")
    return "  ".join(parts)
