import os

import pytest

from dflash_mlx import DFlashError
from dflash_mlx.system.files import keep_text, replace_text, write_report


@pytest.fixture
def full(monkeypatch):
    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)


def test_text_takes_the_place_of_what_was_there(tmp_path):
    file = tmp_path / "Ä.json"
    file.write_text("before")
    replace_text(file, "ü")
    assert file.read_text(encoding="utf-8") == "ü"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.usefixtures("full")
def test_a_report_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(DFlashError, match="report.json cannot be written .*No space"):
        write_report(tmp_path / "report.json", "{}")
    assert list(tmp_path.iterdir()) == []


def test_what_a_cache_folder_cannot_keep_is_done_without(tmp_path, request):
    file = tmp_path / "timing" / "times.json"
    keep_text(file, "{}")
    request.getfixturevalue("full")
    keep_text(file, "other")
    assert [kept.read_text() for kept in file.parent.iterdir()] == ["{}"]
