"""Corpora become texts with features; some rows are kept for measuring and never trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.engine.pair import Pair
from dflash_mlx.train.corpus.rows import CorpusHeader, CorpusRow, tokenizer_fingerprint
from dflash_mlx.train.data import DataConfig, Texts, read_texts
from support.families import VOCAB_SIZE
from support.tiny_training import (
    CONTEXT,
    TAPS,
    Words,
    greedy_rows,
    sampled_row,
    tiny_target,
    write_corpus,
)

WORDS = Words("".join(map(chr, range(40, 40 + VOCAB_SIZE))))
HEADER = CorpusHeader("tiny", VOCAB_SIZE, tokenizer_fingerprint(WORDS))


def rows_of(count: int, seed: int = 0) -> list[CorpusRow]:
    """Greedy answers, each with a category of its own."""
    rows = greedy_rows(count, 9, seed=seed)
    return [replace(row, category=f"{seed}-{i}") for i, row in enumerate(rows)]


def read(folder: Path, *corpora: list[CorpusRow], gigabytes: float = 1.0) -> Texts:
    named = enumerate(corpora)
    paths = [write_corpus(folder / f"corpus-{i}.jsonl", rows, HEADER) for i, rows in named]
    data = DataConfig(tuple(paths), folder / "cache", gigabytes)
    return read_texts(data, Pair(tiny_target(), WORDS), TAPS)


def rows_in(texts: Texts) -> list[CorpusRow]:
    return [text.row for text in texts.texts]


# Reading


def test_texts_are_the_rows_of_all_corpora_with_their_features(tmp_path):
    first, second = rows_of(4), rows_of(3, seed=1)
    texts = read(tmp_path, first, second)
    assert rows_in(texts) == [*first, *second]
    assert [text.number for text in texts.texts] == [0, 1, 2, 3, 0, 1, 2]
    assert len(texts) == 7
    for i, row in enumerate(rows_in(texts)):
        sequence = texts.texts[i]
        assert tuple(sequence.tokens) == row.prompt + row.answer
        assert sequence.prompt_length == len(row.prompt)
        assert tuple(sequence.likely[len(row.prompt) - 1 : -1, 0]) == row.answer
        alone = read(tmp_path / "cache", [row])
        whole = len(sequence.tokens)
        found, expected = texts.features(np.array([i]), whole), alone.features(np.array([0]), whole)
        assert mx.array_equal(found, expected).item()
        choices = alone.texts[0].cache.choices(0)  # as test_train_features.py has it
        assert np.array_equal(sequence.likely, choices["token"])
        assert np.array_equal(sequence.shares, choices["probability"])


def test_rows_that_do_not_fit_the_limit_are_left_out_and_told(tmp_path, capsys):
    rows = rows_of(4)
    room = 2 * len(rows[0].prompt + rows[0].answer) * len(TAPS) * 64 * 2
    texts = read(tmp_path, rows, rows_of(4, seed=1), gigabytes=(room + 1) / 1e9)
    assert texts.name != read(tmp_path / "cache", rows, rows_of(4, seed=1)).name
    assert [text.number for text in texts.texts] == [0, 1, 0, 1]
    said = capsys.readouterr().err
    for name in ("corpus-0", "corpus-1"):
        assert f"{name}.jsonl: rows left out: 2, no room for their features; --cache-gb" in said


def test_a_row_fills_the_context_at_most(tmp_path, capsys):
    row = rows_of(1)[0]
    full = replace(row, answer=tuple(range(CONTEXT - len(row.prompt))))
    over = replace(row, answer=(*full.answer, 1))
    assert rows_in(read(tmp_path, [full, over, row])) == [full, row]
    said = capsys.readouterr().err
    assert f"corpus-0.jsonl: rows left out: 1, longer than the context of {CONTEXT} tokens" in said
    assert "no room" not in said


# Holding out


@pytest.mark.parametrize("held_out", [2, 50])
def test_every_so_many_th_row_of_a_file_measures_and_is_not_trained_on(tmp_path, held_out):
    train, kept = read(tmp_path, rows_of(7), rows_of(4, seed=1)).split(held_out)
    wanted = [f"{seed}-{i}" for seed, n in ((0, 7), (1, 4)) for i in range(0, n, held_out)]
    others = [f"{seed}-{i}" for seed, n in ((0, 7), (1, 4)) for i in range(n) if i % held_out]
    assert [row.category for row in rows_in(kept)] == wanted
    assert [row.category for row in rows_in(train)] == others
    for texts in (train, kept):
        for text in texts.texts:
            assert tuple(text.tokens) == text.row.prompt + text.row.answer
            assert text.cache.features(text.place).shape[0] == len(text.tokens)


def test_greedy_rows_alone_measure_where_there_are_any(tmp_path):
    rows = rows_of(6)
    rows[0], rows[3] = sampled_row("a", rows[0]), sampled_row("b", rows[3])
    train, kept = read(tmp_path, rows).split(2)
    assert [row.id for row in rows_in(kept)] == ["row-2", "row-4"]
    assert [row.id for row in rows_in(train)] == ["row-1", "b", "row-5"]
    only = read(tmp_path, [rows[0], rows[1]])
    assert [row.id for row in rows_in(only.split(2)[1])] == ["a"]
