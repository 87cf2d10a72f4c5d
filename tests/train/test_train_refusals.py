"""What `python -m dflash_mlx.train` refuses, before work starts and without touching a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.cli import options as cli
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.__main__ import main
from dflash_mlx.train.corpus.rows import CorpusRow
from support.tiny_training import CONTEXT, Place, corpus_rows, files

Change = Callable[[Place], dict[str, Any]]


def long(row: CorpusRow) -> CorpusRow:
    return replace(row, answer=row.answer * 8)


def corpus(*rows: CorpusRow, **header: Any) -> Change:
    """Train on these rows."""
    return lambda place: {"corpus": place.write("c.jsonl", rows, replace(place.header, **header))}


REFUSED: dict[str, tuple[Change | dict[str, Any], str]] = {
    "another tokenizer": (corpus(*corpus_rows(), tokenizer="0"), "c.jsonl .*tiny.* other tokens"),
    "another vocabulary": (corpus(*corpus_rows(), vocab_size=98), "98 tokens, .* has 97"),
    "a token outside": (
        corpus(*corpus_rows(), replace(corpus_rows()[0], answer=(97,))),
        "line 9 of .*c.jsonl .* 97, .* 97",
    ),
    "no rows": (corpus(), "c.jsonl holds no rows"),
    "no file": (lambda p: {"corpus": p.root / "no.jsonl"}, "no.jsonl"),
    "rows that are too long": (corpus(*map(long, corpus_rows())), f"c.jsonl .* {CONTEXT} tokens"),
    "a single row": (corpus(corpus_rows()[0]), "one row in all"),
    "no room for features": ({"cache_gb": 0}, "cache_gb is 0.0"),
    "too little room for features": ({"cache_gb": 1e-6}, "1000 bytes"),
    "endless room for features": ({"cache_gb": "inf"}, "cache_gb is inf"),
    "room that is no number": ({"cache_gb": "nan"}, "cache_gb is nan"),
    "a drafter of another target": (
        lambda p: {"init": p.drafter(num_target_layers=30)},
        "target layers 30, .* has 3",
    ),
    "no drafter": (lambda p: {"init": p.root}, "config.json"),
    "a folder of other files": (lambda p: {"out": p.root}, "no run to continue"),
    "a file in its place": (lambda p: {"out": p.corpus}, "no run to continue"),
    "a folder for a picture": (lambda p: {"plot": p.root}, "is a folder"),
    "neither steps nor minutes": ({"steps": None}, r"\(None, None\)"),
    "steps and minutes": ({"minutes": 1}, r"\(1.0, 4\)"),
    "nothing to train on": ({"held_out": 1}, "held_out is 1"),
    "labels softer than the target": ({"soft": 1.5}, "soft is 1.5"),
    "labels of no softness": ({"soft": "nan"}, "soft is nan"),
    "more layers than there are": ({"layers": 4}, "layers is 4, .* 3"),
    "no model": (lambda p: {"model": p.root / "no"}, "no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_with_is_refused_in_one_sentence(place, monkeypatch, capsys, case):
    change, named = REFUSED[case]
    options = change if isinstance(change, dict) else change(place)
    before = files(place.root)
    monkeypatch.setattr("sys.argv", ["train", *place.words(**options)])
    with pytest.raises(SystemExit) as left:
        cli.run(main, "dflash_mlx.train")
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    (sentence,) = [line for line in said.err.splitlines() if line.startswith("dflash_mlx.train: ")]
    assert re.search(named + ".*; ", sentence), "the value, and then the next step"
    after = files(place.root)
    assert {name: after[name] for name in before} == before
    assert not (place.root / "out").exists()


def test_a_run_on_another_corpus_is_not_continued(place):
    place.train(steps=2)
    before = files(place.out)
    other = place.write("c.jsonl", corpus_rows()[:5])
    with pytest.raises(DFlashError, match="data 'corpus-.*', not 'c-") as failure:
        place.train(steps=3, corpus=other)
    assert "--out" in failure.value.next_step
    assert files(place.out) == before


def test_a_picture_without_matplotlib_is_refused_before_work_starts(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlashError, match="matplotlib"):
        place.train(plot=place.root / "run.png")
    assert not place.out.exists()
