"""A model and its quantisations: what each takes; the chosen one is fetched."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.markup import escape
from textual.widgets import OptionList, ProgressBar
from textual.widgets.option_list import Option

from dflash_chat.aside import aside
from dflash_chat.problems import describe
from dflash_chat.screens import Dialog
from dflash_mlx.client import (
    DEFAULT_MODEL,
    AvailableModel,
    Download,
    PairConfig,
    amount,
    download_plans,
    installed_memory,
    memory_here,
)

_LOOK = 0.2  # seconds between looks at how far a download is


class DownloadScreen(Dialog[PairConfig | None]):
    """Gives the pair to load once it is here, None when none was chosen.

    A model that is here already, or that can only be asked for by loading it, is given at once;
    with `everything` its quantisations are shown first. start: fetch the first one with 4 bits or
    more a weight, or else the user chooses.
    """

    BINDINGS = [("escape", "leave", "Leave")]

    def __init__(self, config: PairConfig, everything: bool = False, start: bool = False) -> None:
        super().__init__()
        self._config, self._everything, self._start = config, everything, start
        self._coming = download_plans(config, everything)
        self._offers: list[AvailableModel] = []
        self._download: Download | None = None

    def compose(self) -> ComposeResult:
        keys = "Enter fetches and loads, Esc stops or leaves"
        with self.frame(escape(self._config.model or DEFAULT_MODEL), keys):
            yield self.problem_line()
            yield OptionList(markup=False)
            yield ProgressBar(total=1.0, show_eta=False, id="fetching")

    def on_mount(self) -> None:
        self.say("asking Hugging Face ...")
        self.query_one("#fetching").display = False
        self.query_one(OptionList).focus()
        self.set_interval(_LOOK, self._look)
        self._ask()

    def on_unmount(self) -> None:
        if self._download is not None:
            self._download.stop()

    def _ask(self) -> None:
        asked = aside(lambda: (next(self._coming, None), memory_here()))
        self.hear(asked, self._found, self._not_found)

    def _not_found(self, problem: str) -> None:
        self._found((AvailableModel(self._config, problem=problem), memory_here()))

    def _found(self, found: tuple[AvailableModel | None, str]) -> None:
        offer, memory = found
        name, options = self._config.model or DEFAULT_MODEL, self.query_one(OptionList)
        self.query_one(".dialog").border_title = escape(f"{name} for {memory}")
        if offer is None:
            self._end_of_offers()
        elif offer.here and not self._offers and not self._everything:
            self.dismiss(offer.config)
        else:
            self._offers.append(offer)
            told = f"{offer.name}\n  {offer.terms(installed_memory())}"
            options.add_option(Option(told, disabled=bool(offer.problem)))
            if options.highlighted is None and not offer.problem:
                options.highlighted = options.option_count - 1
            if self._start and not offer.problem and 4 <= offer.bits < 16:
                self._start, options.highlighted = False, options.option_count - 1
                options.action_select()
            self._ask()

    def _end_of_offers(self) -> None:
        """Where nothing can be had, loading says why, and which names are near."""
        if any(not offer.problem for offer in self._offers):
            if self._download is None:
                self.say("")
        elif self._everything:
            self.say("Hugging Face says nothing about it.")
        else:
            self.dismiss(self._config)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        offer, download = self._offers[event.option_index], self._download
        if download is not None and not download.ended.is_set():
            how = "stopped; wait a moment" if download.stopped else "fetched; Esc stops it"
            self.say(f"{download.config.model} is being {how}.")
        elif offer.here:
            self.dismiss(offer.config)
        else:
            self._download = Download(offer.config)
            self.say(f"fetching {offer.name}")
            self.query_one("#fetching").display = True

    def _look(self) -> None:
        download = self._download
        if download is None or download.stopped:
            return
        if download.finished:
            self.dismiss(download.config)
        elif download.error is not None:
            self.say(describe(download.error))
            self._download = None
            self.query_one("#fetching").display = False
        elif download.total:
            done, total = amount(download.done), amount(download.total)
            self.say(f"fetching {download.config.model}, {done} of {total}")
            share = min(download.done / download.total, 1.0)
            self.query_one("#fetching", ProgressBar).update(total=1.0, progress=share)

    def action_leave(self) -> None:
        download = self._download
        if download is None or download.stopped:
            self.dismiss(None)
        else:
            download.stop()
            self.query_one("#fetching").display = False
            self.say("Stopped. Finished files stay; Enter resumes.")
