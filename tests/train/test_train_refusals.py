"""What `python -m dflash_mlx.train` refuses, before work starts and without touching a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dflash_mlx.cli import options as cli
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.__main__ import main
from dflash_mlx.train.corpus.rows import CorpusRow
from support.tiny_training import CONTEXT, Place, corpus_rows, files


def short(row: CorpusRow) -> CorpusRow:
    return replace(row, answer=row.answer[:3])


def long(row: CorpusRow) -> CorpusRow:
    return replace(row, answer=row.answer * 8)


Change = Callable[[Place], dict[str, Any]]
REFUSED: dict[str, tuple[Change, str]] = {
    "another tokenizer": (
        lambda p: {"corpus": p.write("c.jsonl", corpus_rows(), replace(p.header, tokenizer="0"))},
        r"c.jsonl was made with tiny, whose vocabulary has other tokens.*; use it with tiny",
    ),
    "another vocabulary": (
        lambda p: {"corpus": p.write("c.jsonl", corpus_rows(), replace(p.header, vocab_size=98))},
        "whose vocabulary has 98 tokens, but this model has 97",
    ),
    "a token outside": (
        lambda p: {
            "corpus": p.write("c.jsonl", [*corpus_rows(), replace(corpus_rows()[0], answer=(97,))])
        },
        "line 9 of .*c.jsonl holds the token 97, .* has only 97",
    ),
    "no rows": (lambda p: {"corpus": p.write("c.jsonl", [])}, r"c.jsonl holds no rows; make"),
    "no file": (lambda p: {"corpus": p.root / "no.jsonl"}, "no.jsonl cannot be read"),
    "rows that are too long": (
        lambda p: {"corpus": p.write("c.jsonl", [long(row) for row in corpus_rows()])},
        f"no row of .*c.jsonl .* the context of {CONTEXT} tokens; make the corpus again",
    ),
    "a single row": (
        lambda p: {"corpus": p.write("c.jsonl", corpus_rows()[:1])},
        "the corpora have one row in all; make a larger corpus",
    ),
    "no room for features": (lambda p: {"cache_gb": 0}, "cache_gb is 0.0; choose"),
    "too little room for features": (lambda p: {"cache_gb": 1e-6}, "1000 bytes have no room"),
    "endless room for features": (lambda p: {"cache_gb": "inf"}, "cache_gb is inf"),
    "room that is no number": (lambda p: {"cache_gb": "nan"}, "cache_gb is nan"),
    "a drafter of another target": (
        lambda p: {"init": p.drafter(num_target_layers=30)},
        "made for a target with number of target layers 30, .* has 3",
    ),
    "no drafter": (lambda p: {"init": p.root}, "has no config.json"),
    "a folder of other files": (lambda p: {"out": p.root}, "holds no run to continue.*--out"),
    "a file in its place": (lambda p: {"out": p.corpus}, "holds no run to continue.*--out"),
    "neither steps nor minutes": (lambda p: {"steps": None}, "one of --minutes and --steps"),
    "steps and minutes": (lambda p: {"minutes": 1}, "one of --minutes and --steps"),
    "nothing to train on": (lambda p: {"held_out": 1}, "held_out is 1; choose 2 or more"),
    "labels softer than the target": (lambda p: {"soft": 1.5}, "soft is 1.5; choose 0 to 1"),
    "labels harder than the text": (lambda p: {"soft": -0.1}, "soft is -0.1; choose 0 to 1"),
    "labels of no softness": (lambda p: {"soft": "nan"}, "soft is nan; choose 0 to 1"),
    "more layers than there are": (lambda p: {"layers": 4}, "layers is 4, .*only 3.*--layers"),
    "no model": (lambda p: {"model": p.root / "no"}, "no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_with_is_refused_with_a_next_step(place, case):
    change, message = REFUSED[case]
    options = change(place)
    before = files(place.root)
    with pytest.raises(DFlashError, match=message) as failure:
        place.train(**options)
    assert failure.value.next_step
    after = files(place.root)
    assert {name: after[name] for name in before} == before
    assert not (place.root / "out").exists()


@pytest.mark.parametrize("soft", ["1.5", "-0.5", "nan"])
def test_a_share_of_soft_labels_that_is_none_ends_with_2_and_one_sentence(
    place, soft, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["train", *place.words(soft=soft)])
    with pytest.raises(SystemExit) as left:
        cli.run(main, "dflash_mlx.train")
    said = capsys.readouterr()
    assert left.value.code == 2
    assert said.err == f"dflash_mlx.train: soft is {soft}; choose 0 to 1\n"
    assert said.out == "" and not place.cache.exists() and not place.out.exists()


def test_rows_that_are_too_long_are_left_out(place, capsys):
    corpus = place.write("c.jsonl", [*map(short, corpus_rows()), *map(long, corpus_rows())])
    place.train(corpus=corpus)
    assert f"{corpus}: rows left out: {len(corpus_rows())}, longer" in capsys.readouterr().err
    (index,) = place.cache.glob("c-*/index.json")
    assert json.loads(index.read_text())["sequences"] == len(corpus_rows())


@pytest.mark.parametrize("name", ["features", "choices", "checksums"])
def test_a_damaged_cache_is_reported(place, name):
    place.train(steps=1)
    (file,) = place.cache.glob(f"*/{name}.bin")
    data = bytearray(file.read_bytes())
    data[8 * 3 + 1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(DFlashError, match="is damaged at sequence .*; delete that folder"):
        place.train(steps=20)


def test_a_run_with_other_settings_is_not_continued(place):
    place.train(steps=2)
    before = files(place.out)
    for options, message in [
        ({"seed": 3}, "has seed 0, not 3"),
        ({"mode": "variable-prefix"}, "has mode 'dflash', not 'variable-prefix'"),
        ({"corpus": place.write("c.jsonl", corpus_rows()[:5])}, "has data 'corpus-.*', not 'c-"),
        ({"layers": 2}, "has layers 1, not 2"),
    ]:
        with pytest.raises(DFlashError, match=message) as failure:
            place.train(**{"steps": 3, **options})
        assert "--out" in failure.value.next_step
        assert files(place.out) == before


@pytest.mark.parametrize("name", ["state.json", "arrays.safetensors"])
def test_a_damaged_state_is_reported_and_kept(place, name):
    place.train(steps=2)
    file = place.out / "state" / name
    file.write_bytes(file.read_bytes()[:-30])
    before = files(place.out)
    said = r"out/state.* (cannot be read|is damaged) .*--init .*out"
    with pytest.raises(DFlashError, match=said):
        place.train(steps=3)
    assert files(place.out) == before
    place.train(steps=3, init=place.out, out=place.root / "again")
