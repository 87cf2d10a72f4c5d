"""Choosing a model from a list, or typing its name; fetching and removing models."""

from __future__ import annotations

from pathlib import Path

from textual.app import ComposeResult
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from dflash_chat.aside import aside
from dflash_chat.download_screen import DownloadScreen
from dflash_chat.fields import TextField
from dflash_chat.screens import Dialog, confirm
from dflash_mlx.client import (
    DEFAULT_MODEL,
    AvailableModel,
    CacheEntry,
    PairConfig,
    amount,
    available_memory,
    available_models,
    cache_entries,
    memory_needed,
    remove_entry,
)


class PickerScreen(Dialog[PairConfig | None]):
    """Gives the pair to load, None when none was chosen."""

    BINDINGS = [
        ("escape", "leave", "Leave"),
        ("d,delete", "remove", "Remove"),
        ("v", "variants", "Quantisations"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._models: list[AvailableModel] = []

    def compose(self) -> ComposeResult:
        keys = "Enter chooses, v quantisations, d removes, Tab a name, Esc"
        with self.frame("Models", keys):
            yield self.problem_line()
            yield OptionList(markup=False)
            yield TextField(
                placeholder="a Hugging Face id like owner/name, or a folder", compact=True
            )

    def on_mount(self) -> None:
        self._fill()

    def _fill(self) -> None:
        self.query_one(OptionList).loading = True
        self.hear(aside(lambda: (available_models(Path()), available_memory())), self._filled)

    def _filled(self, found: tuple[list[AvailableModel], int]) -> None:
        models, there = found
        self.query_one(".dialog").border_title = f"Models, {amount(there)} of memory"
        self._models = sorted(models, key=lambda m: not m.here and m.needs > there)
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        options.loading = False
        options.clear_options()
        options.add_options([Option(line(model, there)) for model in self._models])
        options.highlighted = min(at, len(models) - 1)
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
        """Look what there is of the model, and ask whether to remove that."""
        if (model := self._chosen()) is not None:
            self.say("")
            self.hear(aside(lambda: removable(model.name)), self._removable)

    def _removable(self, kept: list[CacheEntry]) -> None:
        if not kept:
            self.say("There is nothing of this model on the disk that the chat may remove.")
            return
        name, size = kept[0].name, amount(sum(each.size for each in kept))
        confirm(
            self.app,
            f"Remove {name} ({size}) from the disk?",
            lambda: self.hear(aside(lambda: [*map(remove_entry, kept)]), lambda _: self._fill()),
        )

    def _offer(self, config: PairConfig, everything: bool = False) -> None:
        def chosen(config: PairConfig | None) -> None:
            if config is None:
                self._fill()  # something may have been fetched meanwhile
            else:
                self.dismiss(config)

        self.app.push_screen(DownloadScreen(config, everything), chosen)

    def _chosen(self) -> AvailableModel | None:
        at = self.query_one(OptionList).highlighted
        return None if at is None or not self._models else self._models[at]


def removable(name: str) -> list[CacheEntry]:
    """What lies on the disk of the model of this name, and is the chat's or the hub's to remove."""
    kinds = ("model", "unfinished", "converted")
    return [each for each in cache_entries(Path()) if each.name == name and each.kind in kinds]


def line(model: AvailableModel, there: int) -> str:
    """What a model is, and below it the memory that it needs, its drafter and notes."""
    size = f", about {amount(model.download)} at 4 bits" if model.download else ""
    about = "" if model.here else "about "
    needs = memory_needed(model.needs, there, about) if model.needs else ""
    drafter = model.drafter + ", not verified" * (not model.verified)
    details = "; ".join(part for part in (needs, drafter) if part)
    lines = [f"{model.name}  {model.place}{size}", details, model.notes]
    return "\n  ".join(line for line in lines if line)
