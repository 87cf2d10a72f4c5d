"""What choosing a model would take, and downloads that stop and go on.

The hub is on this machine.
"""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_mlx.client import DFlashError, Download, PairConfig, download_plans
from dflash_mlx.models import downloads as module
from dflash_mlx.models.names import whole_copy
from support.hub_server import Hub, serve, use_hub
from support.models import write_drafter, write_model

TARGET, DRAFTER = "owner/Model-4B", "owner/drafter"
QUANTISED = ("mlx-community/Model-4B-8bit", "mlx-community/Model-4B-4bit")
PAIR = PairConfig(TARGET, DRAFTER)
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """With a target, two quantisations, models named alike, and a drafter; an empty cache."""
    model = write_model(tmp_path / "model")
    others = ("mlx-community/Model-4B-Instruct-4bit", "someone/Model-4B-4bit")
    folders = dict.fromkeys((TARGET, *QUANTISED, *others), model)
    folders |= {DRAFTER: write_drafter(tmp_path / "drafter")}
    folders |= {"owner/wide": write_drafter(tmp_path / "wide", hidden_size=128)}
    with serve(folders, tmp_path / "cache") as served:
        yield served


def finish(download: Download) -> Download:
    assert download.ended.wait(60)
    return download


# Offers


def test_a_model_on_the_hub_is_offered_with_its_size_and_its_quantisations(hub):
    found = list(download_plans(PAIR))
    assert [offer.name for offer in found] == [TARGET, QUANTISED[1], QUANTISED[0]]
    assert [offer.config.drafter for offer in found] == [DRAFTER] * 3
    files = [*hub.repositories[TARGET].iterdir(), *hub.repositories[DRAFTER].iterdir()]
    assert found[0].download == sum(file.stat().st_size for file in files)
    assert found[0].needs > 0
    assert not any(offer.here or offer.problem for offer in found)
    assert None not in hub.fetched(), "asking downloads nothing"


def test_a_model_that_is_here_is_the_only_offer(hub, tmp_path):
    finish(Download(PAIR))
    (offer,) = download_plans(PAIR)
    assert offer.here
    assert [offer.here for offer in download_plans(PAIR, everything=True)] == [True, False, False]
    local = PairConfig(str(hub.repositories[TARGET]), str(hub.repositories[DRAFTER]))
    (offer,) = download_plans(local)
    assert offer.here


def test_the_built_in_model_is_offered_alone_whether_it_was_fetched_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "kept_at", lambda: tmp_path / "default.gguf")
    (offer,) = download_plans(PairConfig())
    assert offer.needs > 0 and offer.download == module.DEFAULT_TARGET.size
    (tmp_path / "default.gguf").write_text("")
    (offer,) = download_plans(PairConfig())
    assert offer.here


def test_a_model_that_cannot_be_had_is_offered_with_the_reason(hub, monkeypatch):
    (offer,) = download_plans(PairConfig("owner/none"))
    assert "'owner/none'" in offer.problem and not offer.here
    use_hub(monkeypatch)
    (offer,) = download_plans(PAIR)
    assert "cannot be reached" in offer.problem
    with pytest.raises(DFlashError, match="nowhere/at/all"):
        list(download_plans(PairConfig("nowhere/at/all")))


# Downloads


def test_a_download_fetches_model_and_drafter_and_counts_their_bytes(hub):
    expected = next(download_plans(PAIR)).download
    download = finish(Download(PAIR))
    assert download.finished and download.error is None
    assert 0 < download.total <= expected, "configurations were read before, to check the pair"
    assert download.done == download.total
    assert whole_copy(TARGET) and whole_copy(DRAFTER, "drafter")


def test_a_stopped_download_goes_on_with_the_files_that_are_missing(hub, tmp_path):
    hub.held[WEIGHTS] = threading.Event()
    config = PairConfig(TARGET)
    download = Download(config)
    assert hub.reached.wait(60)
    download.stop()
    hub.held.pop(WEIGHTS).set()
    finish(download)
    assert download.stopped and not download.finished and download.error is None
    assert whole_copy(TARGET) is None
    assert list((tmp_path / "cache").rglob("*.incomplete")) == [], "nothing half-written stays"
    assert hub.fetched("tokenizer.json") == [None]
    again = finish(Download(config))
    assert again.finished
    assert again.total == (hub.repositories[TARGET] / WEIGHTS).stat().st_size
    assert hub.fetched("tokenizer.json") == [None]
    assert whole_copy(TARGET) is not None


def test_a_pair_that_does_not_fit_is_refused_before_its_weights_are_fetched(hub):
    download = finish(Download(PairConfig(TARGET, "owner/wide")))
    assert not download.finished
    assert "hidden_size 128" in str(download.error)
    assert None not in hub.fetched()


def test_a_disk_without_room_is_told_before_anything_is_fetched(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 1000))
    download = finish(Download(PAIR))
    assert isinstance(download.error, DFlashError)
    assert "1.0 kB free" in str(download.error)
    assert None not in hub.fetched()


def test_a_download_that_fails_keeps_the_reason(hub, monkeypatch):
    monkeypatch.setattr(module, "check_space", lambda *_: hub.repositories.clear())
    download = finish(Download(PairConfig(TARGET)))
    assert isinstance(download.error, DFlashError)
    assert TARGET in str(download.error)
