"""Choosing a model from a table, or typing its name; fetching and removing models."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.widgets import DataTable, Input, Static

from dflash_chat.aside import aside
from dflash_chat.download_screen import DownloadScreen
from dflash_chat.fields import TextField
from dflash_chat.screens import Dialog, confirm
from dflash_mlx.client import (
    DEFAULT_MODEL,
    GROUPS,
    AvailableModel,
    CacheEntry,
    PairConfig,
    amount,
    available_models,
    cache_entries,
    grouped,
    installed_memory,
    memory_here,
    remove_entry,
)

_GROUP = "Enter folds. tok/s is computed from memory; drafts come on top. ! is too large for here."
_COLUMNS = {"model": None, "download": 9, "  memory": 11, "drafts": 12, " tok/s": 7}  # widths


class PickerScreen(Dialog[PairConfig | None]):
    """Gives the pair to load, None when none was chosen.

    read_speed: bytes of weights that this machine reads per second, once that is measured.
    """

    BINDINGS = [
        ("escape", "leave", "Leave"),
        ("d,delete", "remove", "Remove"),
        ("v", "variants", "Quantisations"),
    ]

    def __init__(self, read_speed: Future[float]) -> None:
        super().__init__()
        self._models: list[AvailableModel] = []
        self._best: AvailableModel | None = None
        self._rows: list[AvailableModel | str] = []  # a group's name, or a model of it
        self._folded = {GROUPS[-1]}
        self._future, self._read_speed = read_speed, 0.0
        self.table = DataTable[Text](cursor_type="row", cell_padding=0)

    def compose(self) -> ComposeResult:
        keys = "Enter fetches and starts, v quantisations, d removes, Tab a name, Esc"
        with self.frame("Models", keys):
            yield self.problem_line()
            yield self.table
            yield Static(id="about", markup=False)
            told = "a Hugging Face id like owner/name, or a folder"
            yield TextField(placeholder=told, compact=True)

    def on_mount(self) -> None:
        for name, width in _COLUMNS.items():
            self.table.add_column(name, width=width)
        self._fill()
        self.hear(self._future, self._measured)

    def _fill(self) -> None:
        self.table.loading = True
        self.hear(aside(lambda: (available_models(Path()), memory_here())), self._filled)

    def _filled(self, found: tuple[list[AvailableModel], str]) -> None:
        self._models, memory = found
        self.query_one(".dialog").border_title = f"Models for {memory}"
        self.table.loading = False
        first = not self._rows
        self._draw()
        if first:
            self.table.move_cursor(row=self._rows.index(self._best) if self._best else 1)
        if self.is_active:
            self.table.focus()

    def _measured(self, read_speed: float) -> None:
        self._read_speed = read_speed
        self._draw()

    def _draw(self) -> None:
        """All rows anew; the cursor stays where it is."""
        table, at, installed = self.table, self.table.cursor_row, installed_memory()
        groups, self._best = grouped(self._models, installed, self._read_speed)
        table.clear()
        self._rows = []
        for group, models in groups.items():
            folded = group in self._folded
            if models:
                self._rows.append(group)
                table.add_row(Text(f"{'▸' if folded else '▾'} {group} ({len(models)})", "bold"))
            for model in models if not folded else ():
                self._rows.append(model)
                name = f"{'★' if model is self._best else ' '} {model.short} "
                table.add_row(*map(Text, (name, *model.cells(installed, self._read_speed))))
        table.move_cursor(row=min(at, len(self._rows) - 1))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        row = self._rows[event.cursor_row] if event.cursor_row < len(self._rows) else ""
        told = about(row, row is self._best) if isinstance(row, AvailableModel) else _GROUP
        self.query_one("#about", Static).update(told)

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        row = self._rows[event.cursor_row]
        if isinstance(row, str):
            self._folded ^= {row}
            self._draw()
        elif row.here:
            self.dismiss(row.config)
        else:
            self._offer(row.config, start=True)

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

    def _offer(self, config: PairConfig, everything: bool = False, start: bool = False) -> None:
        def chosen(config: PairConfig | None) -> None:
            if config is None:
                self._fill()  # something may have been fetched meanwhile
            else:
                self.dismiss(config)

        self.app.push_screen(DownloadScreen(config, everything, start), chosen)

    def _chosen(self) -> AvailableModel | None:
        row = self._rows[self.table.cursor_row] if self._rows else None
        return row if isinstance(row, AvailableModel) else None


def first_offer(folder: Path, read_speed: float) -> AvailableModel | None:
    """The model to recommend to who has never talked here, once; else None.

    folder: of the conversations, in which a mark says that it was told.
    """
    mark = folder / ".offered"
    if mark.exists() or any(folder.glob("*.jsonl")):
        return None
    best = grouped(available_models(Path()), installed_memory(), read_speed)[1]
    if best is not None and not best.here:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
            return best
    return None


def removable(name: str) -> list[CacheEntry]:
    """What lies on the disk of the model of this name, and is the chat's or the hub's to remove."""
    kinds = ("model", "unfinished")
    return [each for each in cache_entries(Path()) if each.name == name and each.kind in kinds]


def about(model: AvailableModel, best: bool) -> str:
    """What the table has no room for."""
    told = [model.name, model.place, "★ recommended for this machine" * best]
    tried = "" if model.entry.verified else ", never tried with this program"
    told += [f"drafts by {model.drafter}{tried}" * bool(model.drafter), model.entry.notes]
    return " · ".join(part for part in told if part)
