"""Choosing, fetching and removing models in the chat."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input, OptionList

from dflash_chat import download_screen, picker_screen
from dflash_chat.download_screen import DownloadScreen
from dflash_chat.picker_screen import PickerScreen, first_offer
from dflash_chat.screens import ConfirmScreen
from dflash_mlx.client import (
    AvailableModel,
    CacheEntry,
    DFlashError,
    PairConfig,
)
from dflash_mlx.models.names import Entry
from support.app_scripts import drive, in_chat

GB = 10**9
LISTED = [
    AvailableModel(PairConfig(), GB, place="built in"),
    AvailableModel(PairConfig("./own", "./own-drafter"), 5 * GB, place="local folder"),
    AvailableModel(PairConfig("big/model"), 8 * GB, 4 * GB, place="to download"),
    AvailableModel(PairConfig("larger/one"), 90 * GB, 50 * GB, place="to download"),
]
BEST = AvailableModel(
    PairConfig("best/model"), 6 * GB, 3 * GB, place="to download", entry=Entry((), "", best_from=8)
)
FOUR = PairConfig("mlx-community/model-4bit")
OFFERED = [
    AvailableModel(PairConfig("big/model"), 9 * GB, 8 * GB),
    AvailableModel(FOUR, GB, 2 * GB),
]


class FakeDownload:
    """As `dflash_mlx.Download`; the test moves it on."""

    made: list[FakeDownload]

    def __init__(self, config: PairConfig) -> None:
        self.config, self.total, self.done = config, 2 * GB, 0
        self.error: Exception | None = None
        self.ended, self.stopped = threading.Event(), False
        self.made.append(self)

    @property
    def finished(self) -> bool:
        return self.ended.is_set() and self.error is None and not self.stopped

    def stop(self) -> None:
        self.stopped = not self.finished
        self.ended.set()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[FakeDownload]:
    """Those that were begun; models, disk and hub are made up."""
    FakeDownload.made = []
    monkeypatch.setattr(picker_screen, "available_models", lambda here: LISTED)
    monkeypatch.setattr(picker_screen, "installed_memory", lambda: 16 * GB)
    monkeypatch.setattr(download_screen, "installed_memory", lambda: 12 * GB)
    monkeypatch.setattr("dflash_chat.runner.read_speed", lambda: 35.0 * GB)
    for screen in (picker_screen, download_screen):
        monkeypatch.setattr(screen, "memory_here", lambda: "16 GB of memory, 2.00 GB free now")
    monkeypatch.setattr(download_screen, "download_plans", lambda config, everything: iter(OFFERED))
    monkeypatch.setattr(download_screen, "Download", FakeDownload)
    return FakeDownload.made


async def open_picker(chat) -> PickerScreen:
    """The cursor is on the first row below that of its group."""
    await chat.say("/model")
    await chat.until(lambda: isinstance(chat.app.screen, PickerScreen))
    await chat.shows("on this disk")
    return chat.app.screen


def options(app: Any) -> list[Any]:
    return list(app.screen.query_one(OptionList).options) if app.screen.query(OptionList) else []


async def open_offers(chat) -> DownloadScreen:
    await open_picker(chat)
    await chat.press("down", "down", "down", "v")
    await chat.until(lambda: isinstance(chat.app.screen, DownloadScreen))
    await chat.until(lambda: len(options(chat.app)) == 2)
    return chat.app.screen


@in_chat(size=(80, 24))
async def test_a_model_that_is_here_is_loaded_when_it_is_chosen(chat, app, backend, downloads):
    await open_picker(chat)
    await chat.press("down", "enter")
    await chat.until(lambda: len(backend.loaded) == 2)
    assert backend.loaded[1] == PairConfig("./own", "./own-drafter")
    assert downloads == []
    app.push_screen(DownloadScreen(PairConfig("[/x]")))
    await chat.pause()
    assert "[/x]" in chat.text, "names are no markup"


@in_chat()
async def test_quantisations_are_offered_and_fetched(chat, app, backend, downloads):
    await open_offers(chat)
    assert "8.00 GB to download; needs 9.00 GB, is too large for this machine" in chat.text
    assert "2.00 GB to download; needs 1.00 GB, fits" in chat.text
    await chat.press("down", "enter")
    (download,) = downloads
    assert download.config == FOUR
    download.done = GB
    await chat.shows("1.00 GB of 2.00 GB")
    download.ended.set()
    await chat.until(lambda: len(backend.loaded) == 2)
    assert backend.loaded[1].model == FOUR.model
    assert app.screen is app.base


@in_chat()
async def test_a_download_stops_with_escape_and_goes_on_with_enter(chat, app, backend, downloads):
    screen = await open_offers(chat)
    await chat.press("enter", "escape")
    assert downloads[0].stopped and app.screen is screen
    await chat.press("enter")
    await chat.until(lambda: len(downloads) == 2)
    assert downloads[1].config == downloads[0].config
    await chat.press("enter")
    assert len(downloads) == 2, "one at a time"
    await chat.press("escape", "escape")
    await chat.until(lambda: isinstance(app.screen, PickerScreen))
    assert downloads[1].stopped and len(backend.loaded) == 1


@in_chat()
async def test_downloads_that_end_or_fail(chat, downloads, monkeypatch):
    monkeypatch.setattr(FakeDownload, "stop", lambda download: setattr(download, "stopped", True))
    await open_offers(chat)
    await chat.press("enter", "escape", "enter")
    assert len(downloads) == 1 and "is being stopped" in chat.text
    downloads[0].ended.set()
    await chat.press("enter")
    assert len(downloads) == 2
    downloads[1].error = DFlashError("the hub refuses", "try later")
    downloads[1].ended.set()
    await chat.shows("the hub refuses; try later")
    await chat.press("enter")
    await chat.until(lambda: len(downloads) == 3)


def test_leaving_the_chat_stops_a_download(downloads, tmp_path):
    async def leave(chat) -> None:
        await open_offers(chat)
        await chat.press("enter")
        assert not downloads[0].stopped

    drive(leave, tmp_path)
    assert downloads[0].stopped


@in_chat()
async def test_typed_names_are_offered(chat, app, backend, downloads, monkeypatch):
    asked = []

    def offered(config, everything):
        asked.append(config.model)
        yield AvailableModel(config, problem="the hub cannot be reached")

    monkeypatch.setattr(download_screen, "download_plans", offered)
    await open_picker(chat)
    await chat.press("tab")
    app.screen.query_one(Input).value = "typed/name"
    await chat.press("enter")
    await chat.until(lambda: len(backend.loaded) == 2)
    assert asked == ["typed/name"] and backend.loaded[1] == PairConfig("typed/name")
    assert app.screen is app.base
    here = [AvailableModel(PairConfig("./own"), GB), AvailableModel(FOUR, GB, 2 * GB)]
    monkeypatch.setattr(download_screen, "download_plans", lambda config, everything: iter(here))
    await open_picker(chat)
    await chat.press("down", "v")
    await chat.until(lambda: isinstance(app.screen, DownloadScreen) and len(options(app)) == 2)
    assert "on this machine" in chat.text, "of one that is here, with V"
    await chat.press("enter")
    await chat.until(lambda: len(backend.loaded) == 3)
    assert chat.notices == []


@in_chat()
async def test_a_model_is_removed_after_a_question(chat, app, downloads, monkeypatch):
    def refuse(kept: CacheEntry) -> None:
        raise DFlashError("a cannot be removed", "make it writable")

    there = [
        CacheEntry("model", "./own", Path("a"), 3 * GB, 0.0, True),
        CacheEntry("calibration", "./own", Path("b"), 1, 0.0),
    ]
    removed = []
    monkeypatch.setattr(picker_screen, "cache_entries", lambda here: there)
    monkeypatch.setattr(picker_screen, "remove_entry", removed.append)
    await open_picker(chat)
    await chat.press("d")
    await chat.shows("nothing of this model")
    await chat.press("down", "d")
    await chat.until(lambda: isinstance(app.screen, ConfirmScreen))
    assert "./own (3.00 GB)" in chat.text
    await chat.press("n", "d")
    await chat.until(lambda: isinstance(app.screen, ConfirmScreen))
    assert removed == []
    await chat.press("y")
    await chat.until(lambda: removed == there[:1])
    await chat.until(lambda: isinstance(app.screen, PickerScreen))
    await chat.shows("own")
    monkeypatch.setattr(picker_screen, "remove_entry", refuse)
    await chat.press("delete")
    await chat.until(lambda: isinstance(app.screen, ConfirmScreen))
    await chat.press("y")
    await chat.shows("a cannot be removed; make it writable")


@in_chat(size=(80, 24))
async def test_models_are_in_three_groups_by_the_memory_that_is_installed(chat, app, downloads):
    await open_picker(chat)
    assert "Models for 16 GB of memory, 2.00 GB free now" in chat.text
    await chat.shows("~5.0")
    assert "model 4.00 GB 8.00 GB ~5.0" in " ".join(chat.text.split())
    assert "on this disk (2)" in chat.text and "fits this machine (1)" in chat.text
    assert "too large for this machine (1)" in chat.text and "one" not in chat.text
    await chat.press("ctrl+end", "enter")
    await chat.shows("90.00 GB !")
    await chat.press("ctrl+home", "enter")
    assert "SmolLM2" not in chat.text.partition("on this disk")[2]


@in_chat()
async def test_the_recommended_model_is_under_the_cursor_and_one_key_starts_it(
    chat, app, backend, downloads, monkeypatch
):
    monkeypatch.setattr(picker_screen, "available_models", lambda here: [*LISTED, BEST])
    await open_picker(chat)
    assert "best/model · to download · ★ recommended" in chat.text
    await chat.press("enter")
    await chat.until(lambda: downloads)
    assert downloads[0].config == FOUR, "that of few bits, not the whole one before it"
    downloads[0].ended.set()
    await chat.until(lambda: len(backend.loaded) == 2)
    assert backend.loaded[1].model == FOUR.model


def test_a_better_model_is_offered_once_to_who_has_never_talked(downloads, monkeypatch, tmp_path):
    monkeypatch.setattr(picker_screen, "available_models", lambda here: [*LISTED, BEST])
    folder = tmp_path / "talks"
    assert first_offer(folder, 1.0 * GB) is None, "it would be slower than one reads"
    assert first_offer(folder, 100.0 * GB) == BEST
    assert first_offer(folder, 100.0 * GB) is None
    (folder / ".offered").unlink()
    (folder / "talk.jsonl").touch()
    assert first_offer(folder, 100.0 * GB) is None

    async def take(chat) -> None:
        monkeypatch.setattr("dflash_chat.runner.first_offer", first_offer)
        chat.app.commands.offer(100.0 * GB)
        await chat.shows("Ctrl+N fetches and starts model, recommended for this machine (3.00 GB)")
        await chat.press("ctrl+n")
        await chat.until(lambda: downloads)
        assert downloads[0].config == FOUR

    drive(take, tmp_path / "other")
