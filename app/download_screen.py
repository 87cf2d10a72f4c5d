"""A model and its quantisations: what each takes; the chosen one is fetched."""

from __future__ import annotations

from threading import Thread

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.markup import escape
from textual.message import Message
from textual.widgets import OptionList, ProgressBar, Static
from textual.widgets.option_list import Option

from dflash_chat.problems import describe
from dflash_chat.screens import Dialog
from dflash_chat.sizes import amount, memory
from dflash_mlx import (
    DEFAULT_MODEL,
    Download,
    Offer,
    PairConfig,
    available_memory,
    offers,
)

_LOOK = 0.2  # seconds between looks at how far a download is


class DownloadScreen(Dialog[PairConfig | None]):
    """Gives the pair to load once it is here, None when none was chosen.

    A model that is here already, or that can only be asked for by loading it, is given at once;
    with `everything` its quantisations are shown first.
    """

    BINDINGS = [("escape", "leave", "Leave")]

    class Found(Message):
        """One more to choose, None after the last; and the memory that is there."""

        def __init__(self, offer: Offer | None, there: int) -> None:
            super().__init__()
            self.offer, self.there = offer, there

    def __init__(self, config: PairConfig, everything: bool = False) -> None:
        super().__init__()
        self._config, self._everything = config, everything
        self._offers: list[Offer] = []
        self._download: Download | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = escape(self._config.model or DEFAULT_MODEL)
            dialog.border_subtitle = "Enter fetches and loads, Esc stops or leaves"
            yield Static("asking the hub ...", id="state", markup=False)
            yield OptionList(markup=False)
            yield ProgressBar(total=1.0, show_eta=False, id="fetching")

    def on_mount(self) -> None:
        self.query_one("#fetching").display = False
        self.query_one(OptionList).focus()
        self.set_interval(_LOOK, self._look)
        Thread(target=self._ask, daemon=True).start()  # which may hang without keeping anybody

    def on_unmount(self) -> None:
        if self._download is not None:
            self._download.stop()

    def _ask(self) -> None:
        """On a thread of its own."""
        there = available_memory()
        try:
            for offer in offers(self._config, self._everything):
                self.post_message(self.Found(offer, there))
        except Exception as error:  # the edge of a thread
            self.post_message(self.Found(Offer(self._config, problem=describe(error)), there))
        self.post_message(self.Found(None, there))

    def on_download_screen_found(self, found: Found) -> None:
        offer, first = found.offer, not self._offers
        name = self._config.model or DEFAULT_MODEL
        self.query_one(".dialog").border_title = escape(f"{name}, {amount(found.there)} of memory")
        if offer is None:
            self._end_of_offers()
        elif first and offer.here and not self._everything:
            self.dismiss(offer.config)
        else:
            self._offers.append(offer)
            options = self.query_one(OptionList)
            options.add_option(Option(line(offer, found.there), disabled=bool(offer.problem)))
            if options.highlighted is None and not offer.problem:
                options.highlighted = options.option_count - 1

    def _end_of_offers(self) -> None:
        """Where nothing can be had, loading says why, and which names are near."""
        if any(not offer.problem for offer in self._offers):
            if self._download is None:
                self._say("")
        elif self._everything:
            self._say("The hub says nothing of it.")
        else:
            self.dismiss(self._config)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        offer, download = self._offers[event.option_index], self._download
        if download is not None and not download.ended.is_set():
            how = "stopped; wait a moment" if download.stopped else "fetched; Esc stops it"
            self._say(f"{download.config.model} is being {how}.")
        elif offer.here:
            self.dismiss(offer.config)
        else:
            self._download = Download(offer.config)
            self._say(f"fetching {offer.name}")
            self.query_one("#fetching").display = True

    def _look(self) -> None:
        """Show how far the download is."""
        download = self._download
        if download is None or download.stopped:
            return
        if download.finished:
            self.dismiss(download.config)
        elif download.error is not None:
            self._say(describe(download.error))
            self._download = None
            self.query_one("#fetching").display = False
        elif download.total:
            done, total = amount(download.done), amount(download.total)
            self._say(f"fetching {download.config.model}, {done} of {total}")
            share = min(download.done / download.total, 1.0)
            self.query_one("#fetching", ProgressBar).update(total=1.0, progress=share)

    def action_leave(self) -> None:
        download = self._download
        if download is None or download.stopped:
            self.dismiss(None)
        else:
            download.stop()
            self.query_one("#fetching").display = False
            self._say("Stopped. Files that came whole stay; Enter goes on with the others.")

    def _say(self, text: str) -> None:
        what = self.query_one("#state", Static)
        what.update(text)
        what.display = bool(text)


def line(offer: Offer, there: int) -> str:
    """What is left to download of a model, and the memory that it needs."""
    if offer.problem:
        return f"{offer.name}\n  {offer.problem}"
    come = "here already" if offer.here else f"{amount(offer.download)} to download"
    needs = f"; {memory(offer.needs, there)}" if offer.needs else ""
    return f"{offer.name}\n  {come}{needs}"
