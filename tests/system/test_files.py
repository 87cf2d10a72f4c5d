import os
from unittest.mock import Mock

import pytest

from dflash_mlx import DFlashError
from dflash_mlx.system.files import keep_text, replace_text, write_report


def test_text_takes_the_place_of_what_was_there_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "Ä.json"
    file.write_text("before")
    replace_text(file, "ü")
    assert file.read_text(encoding="utf-8") == "ü"
    kept = tmp_path / "timing" / "times.json"
    keep_text(kept, "{}")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", Mock(side_effect=full))
    with pytest.raises(DFlashError, match="report.json cannot be written .*No space"):
        write_report(tmp_path / "report.json", "{}")
    keep_text(kept, "what a cache folder cannot keep is done without")
    assert sorted(tmp_path.rglob("*")) == sorted([kept.parent, kept, file])
    assert kept.read_text() == "{}"
