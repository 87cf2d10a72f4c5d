"""`dflash-chat models` and `dflash-chat clean`: listing, fetching and removing without a screen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import platformdirs
import pytest
from huggingface_hub.utils import WeakFileLock

from dflash_chat import main
from dflash_mlx import DFlashError, PairConfig
from dflash_mlx.cli import disk
from dflash_mlx.models.names import whole_copy
from support.hub_server import Hub, serve
from support.models import write_model

TARGET, QUANTISED = "owner/Model-4B", "mlx-community/Model-4B-4bit"
KNOWN = "mlx-community/Qwen3-4B-4bit"  # to the registry


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, an empty folder to be in, and a cache with one calibration."""
    model = write_model(tmp_path / "model")
    timing = tmp_path / "own" / "timing"
    timing.mkdir(parents=True)
    (timing / "0123456789abcdef.json").write_text(json.dumps({"model": TARGET}))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "own")
    served_ids = (TARGET, QUANTISED, KNOWN)
    with serve(dict.fromkeys(served_ids, model), tmp_path / "cache") as served:
        yield served


def calibrations(folder: Path) -> list[Path]:
    return list((folder / "own" / "timing").iterdir())


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints."""

    def run(*words: str) -> str:
        main.run([*words])
        return capsys.readouterr().out

    return run


def test_what_is_here_and_what_could_be_downloaded_is_listed(hub, said, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "installed_memory", lambda: 48 * 2**30)
    monkeypatch.setattr(disk, "read_speed", lambda: 184e9)
    told = said("models")
    (line,) = [line for line in told.splitlines() if line.startswith("calibration")]
    timing = tmp_path / "own" / "timing"
    assert TARGET in line and str(timing / "0123456789abcdef.json") in line
    (line,) = [line for line in told.splitlines() if line.split()[:1] == ["Qwen/Qwen3-4B"]]
    assert " ".join(line.split()[1:]) == "2.25 GB 18.40 GB to download ~11.5 recommended"
    assert "!" not in told, "no line has what would be explained"
    groups = [told.index(group) for group in ("\non this disk", "\nfits this", "\ntoo large")]
    assert groups == sorted(groups) and told.index("moonshotai/Kimi-K2.5") > groups[2]
    (timing / "fedcba9876543210.json").write_text(json.dumps({"model": TARGET}))
    line, total, _ = said("clean", "calibrations").splitlines()
    assert TARGET in line and f"{timing} (2 files)" in line, "several of a model are one line"
    assert total.split() == ["all", "0.1", "kB"] == ["all", *line.split()[1:3]]


def test_a_model_is_described_with_its_drafters_and_quantisations_and_fetched(hub, said):
    memory, *lines = said("models", TARGET).splitlines()
    assert "GB of memory" in memory
    for name in ("owner/none", "no model"):
        with pytest.raises(DFlashError) as refused:
            said("models", name)
        assert name in refused.value.what and "--model" not in str(refused.value)
    assert [line.split()[0] for line in lines] == [TARGET, QUANTISED]
    assert all("to download" in line and "needs" in line for line in lines)
    said("models", QUANTISED, "--download")
    assert whole_copy(QUANTISED) is not None
    assert "on this machine" in said("models", QUANTISED)
    _, drafters, *_ = said("models", KNOWN).splitlines()
    assert drafters.startswith("draft model z-lab/Qwen3-4B-DFlash-b16, never tried")
    assert "AngelSlim/Qwen3-4B_eagle3 (eagle3)" in drafters


def test_a_download_that_fails_is_an_error_and_one_that_is_interrupted_is_stopped(hub, monkeypatch):
    with pytest.raises(DFlashError, match="owner/none"):
        main.run(["models", "owner/none", "--download"])
    with pytest.raises(SystemExit) as leaving:
        main.run(["models", "--download"])
    assert leaving.value.code == 2
    begun = []

    class Interrupted(disk.Download):
        def __init__(self, config):
            super().__init__(config)
            begun.append(self)
            self.ended.wait = Mock(side_effect=KeyboardInterrupt)

    monkeypatch.setattr(disk, "Download", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        main.run(["models", TARGET, "--download"])
    assert begun[0].stopped
    assert Event.wait(begun[0].ended, 60), "and asks no hub behind this test"


def test_clean_removes_only_what_was_named_and_only_with_yes(hub, said, tmp_path):
    said("models", QUANTISED, "--download")
    assert TARGET in said("clean", "--yes") and TARGET in said("clean", "calibrations")
    assert "Nothing of that kind" in said("clean", "features", "--yes")
    with pytest.raises(DFlashError, match="'owner/none'"):
        said("clean", "calibrations", "owner/none", "--yes")
    assert len(calibrations(tmp_path)) == 1
    said("clean", "calibrations", "--yes")
    assert calibrations(tmp_path) == [] and whole_copy(QUANTISED) is not None
    said("clean", QUANTISED, "--yes")
    assert whole_copy(QUANTISED) is None


def test_clean_leaves_what_another_program_downloads_and_says_so(hub, said, tmp_path):
    said("models", QUANTISED, "--download")
    locks = tmp_path / "cache" / ".locks" / f"models--{QUANTISED.replace('/', '--')}"
    with WeakFileLock(locks / "1.lock"):
        out = said("clean", QUANTISED, "calibrations", "--yes")
        assert f"{QUANTISED} is being downloaded" in out and whole_copy(QUANTISED) is not None
        assert calibrations(tmp_path) == [], "the other thing is removed"
        assert "Removed" not in said("clean", QUANTISED, "--yes")
        *_, line = [line for line in said("models").splitlines() if QUANTISED in line]
        assert line.endswith("(being downloaded)")
    said("clean", QUANTISED, "--yes")
    assert whole_copy(QUANTISED) is None


def test_the_table_of_models_stays_aligned_where_names_are_paths(tmp_path, monkeypatch):
    models = [
        disk.AvailableModel(PairConfig(name), 10**9, place="local folder", drafts="lookup")
        for name in ("/Users/somebody/.lmstudio/models/mlx-community/Qwen3-4B-4bit", "short")
    ]
    monkeypatch.setattr(disk, "available_models", lambda here: models)
    monkeypatch.setattr(disk, "read_speed", lambda: 1e9)
    _, heading, *rows = [line for line in disk._everything(tmp_path) if line][:4]
    ends = {row.index(" GB") + len(" GB") for row in rows}
    assert ends == {heading.strip("\n").index("memory") + len("memory")}
    monkeypatch.setattr(disk, "installed_memory", lambda: 10**8)
    assert any("!: too large" in line for line in disk._everything(tmp_path))
