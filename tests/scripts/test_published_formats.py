"""The table of published configurations is computed, and a value that is read wrongly shows."""

from __future__ import annotations

from published_formats import ROOT, read_by, verdict, written

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import format_of
from dflash_mlx.drafters.networks.files import read_json
from support.published_configs import READ, value_of


def test_every_row_is_read_or_refused_from_a_folder_and_none_misread(tmp_path):
    rows = written(tmp_path)
    few = {name: rows[name] for name in ("SpecForge's Domino", "two answers to which rows draft")}
    found = read_by(ROOT, few)
    assert [verdict(found[name], few[name][1])[0] for name in few] == ["read", "refused"]
    for name, (folder, expected) in rows.items():
        files = format_of(read_json(folder))
        try:
            config = files.read_drafter(folder).config if files else None
        except DFlashError as error:
            told = {"": error.what}
        else:
            told = {field: repr(value_of(config, field)) for field in expected or ()}
        state, why = verdict(told, expected)
        assert state == ("read" if name in READ else "refused"), (name, why)
        if expected and state == "read":
            for field in expected:
                wrong = {**told, field: "'another'"}
                assert verdict(wrong, expected) == (
                    "misread", f"{field} 'another' for {expected[field]}"
                )  # fmt: skip
