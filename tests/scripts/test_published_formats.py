"""The table of published configurations is computed, and a value that is read wrongly shows."""

from __future__ import annotations

from published_formats import ROOT, read_by, verdict, written

from support.published_configs import READ


def test_every_row_is_read_or_refused_from_a_folder_and_none_misread(tmp_path):
    rows = written(tmp_path)
    found = read_by(ROOT, rows)
    for name, (_, expected) in rows.items():
        told = found[name]
        state, why = verdict(told, expected)
        assert state == ("read" if name in READ else "refused"), (name, why)
        if expected and state == "read":
            for field in expected:
                wrong = {**told, field: "'another'"}
                assert verdict(wrong, expected) == (
                    "misread", f"{field} 'another' for {expected[field]}"
                )  # fmt: skip
