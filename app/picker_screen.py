"""Choosing a model from a list, or typing its name; fetching and removing models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dflash_chat.download_screen import DownloadScreen
from dflash_chat.problems import describe
from dflash_chat.screens import ConfirmScreen, Dialog
from dflash_chat.sizes import amount, memory
from dflash_mlx import (
    DEFAULT_MODEL,
    AvailableModel,
    Kept,
    PairConfig,
    available_memory,
    available_models,
    kept_files,
    remove_kept,
)


class PickerScreen(Dialog[PairConfig | None]):
    """Gives the pair to load, None when none was chosen.

    Disks and hubs are asked on threads, which tell of it in messages.
    """

    BINDINGS = [
        ("escape", "leave", "Leave"),
        ("d,delete", "remove", "Remove"),
        ("v", "variants", "Quantisations"),
    ]

    class Found(Message):
        """The models to choose from, and the memory that is there."""

        def __init__(self, models: list[AvailableModel], there: int) -> None:
            super().__init__()
            self.models, self.there = models, there

    class Removable(Message):
        """What of the chosen model lies on the disk."""

        def __init__(self, kept: list[Kept]) -> None:
            super().__init__()
            self.kept = kept

    class Problem(Message):
        """What could not be done, "" where it was."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__()
        self._models: list[AvailableModel] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = "Models"
            dialog.border_subtitle = "Enter chooses, v quantisations, d removes, Tab a name, Esc"
            yield Static(id="problem", markup=False)
            yield OptionList(markup=False)
            yield Input(placeholder="a Hugging Face id like owner/name, or a folder", compact=True)

    def on_mount(self) -> None:
        self._say("")
        self._fill()

    def _fill(self) -> None:
        self.query_one(OptionList).loading = True
        self._start(lambda: self.Found(available_models(Path()), available_memory()))

    def _start(self, ask: Callable[[], Message]) -> None:
        """Post what `ask` finds; a thread that hangs keeps nobody from leaving."""

        def run() -> None:
            try:
                found = ask()
            except Exception as error:  # the edge of a thread
                found = self.Problem(describe(error))
            self.post_message(found)

        Thread(target=run, daemon=True).start()

    def on_picker_screen_found(self, found: Found) -> None:
        there = found.there
        self.query_one(".dialog").border_title = f"Models, {amount(there)} of memory"
        self._models = sorted(found.models, key=lambda m: not m.here and m.needs > there)
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        options.loading = False
        options.clear_options()
        options.add_options([Option(line(model, there)) for model in self._models])
        options.highlighted = min(at, len(found.models) - 1)
        if self.is_active:
            options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        model = self._models[event.option_index]
        if model.here:
            self.dismiss(model.config)
        else:
            self._offer(model.config)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if name := event.value.strip():
            self._offer(PairConfig(None if name == DEFAULT_MODEL else name))

    def action_variants(self) -> None:
        if (model := self._chosen()) is not None:
            self._offer(model.config, everything=True)

    def action_remove(self) -> None:
        """Ask for what is there of the model; the answer asks whether to remove it."""
        if (model := self._chosen()) is not None:
            self._say("")
            self._start(lambda: self.Removable(removable(model.name)))

    def on_picker_screen_removable(self, found: Removable) -> None:
        if not found.kept:
            self._say("There is nothing of this model on the disk that the chat may remove.")
            return
        name, size = found.kept[0].name, amount(sum(each.size for each in found.kept))

        def answer(sure: bool | None) -> None:
            if sure:
                self._start(lambda: self._remove(found.kept))

        self.app.push_screen(ConfirmScreen(f"Remove {name} ({size}) from the disk?"), answer)

    def _remove(self, kept: list[Kept]) -> Message:
        for each in kept:
            remove_kept(each)
        return self.Problem("")

    def on_picker_screen_problem(self, problem: Problem) -> None:
        self._say(problem.text)
        if not problem.text:
            self._fill()

    def action_leave(self) -> None:
        self.dismiss(None)

    def _offer(self, config: PairConfig, everything: bool = False) -> None:
        """Let the user choose among a model and its quantisations, and fetch the choice."""

        def chosen(config: PairConfig | None) -> None:
            if config is None:
                self._fill()  # something may have been fetched meanwhile
            else:
                self.dismiss(config)

        self.app.push_screen(DownloadScreen(config, everything), chosen)

    def _chosen(self) -> AvailableModel | None:
        at = self.query_one(OptionList).highlighted
        return None if at is None or not self._models else self._models[at]

    def _say(self, text: str) -> None:
        problem = self.query_one("#problem", Static)
        problem.update(text)
        problem.display = bool(text)


def removable(name: str) -> list[Kept]:
    """What lies on the disk of the model of this name, and is the chat's or the hub's to remove."""
    kinds = ("model", "unfinished", "converted")
    return [each for each in kept_files(Path()) if each.name == name and each.kind in kinds]


def line(model: AvailableModel, there: int) -> str:
    """What a model is, and below it the memory that it needs, its drafter and notes."""
    size = f", about {amount(model.download)} at 4 bits" if model.download else ""
    about = "" if model.here else "about "
    needs = memory(model.needs, there, about) if model.needs else ""
    drafter = model.drafter + ", not verified" * (not model.verified)
    details = "; ".join(part for part in (needs, drafter) if part)
    lines = [f"{model.name}  {model.place}{size}", details, model.notes]
    return "\n  ".join(line for line in lines if line)
