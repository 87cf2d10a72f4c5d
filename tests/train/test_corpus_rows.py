"""Corpus files: what is written is read back, and what is damaged is refused with its line."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.rows import (
    CorpusHeader,
    CorpusRow,
    open_corpus,
    read_rows,
    tokenizer_fingerprint,
)
from support.families import VOCAB_SIZE
from support.tiny_training import LetterTokenizer, full_disk, write_corpus

MESSAGES = ({"role": "user", "content": "a\u2028b"},)
ROWS = [
    CorpusRow("one", "math", (1, 2, 96), (4, 1), 0.0, finish="stop"),
    CorpusRow("two", "chat", (3,), (5, 6, 7), 0.6, 0.95, 2**32 - 1, "length", MESSAGES),
]
OLD = {"p": [1, 2], "o": [3], "t": 0.0}
HEADER = CorpusHeader("tiny", VOCAB_SIZE, tokenizer_fingerprint(LetterTokenizer("ab")), {"seed": 3})


def write(file: Path) -> bytes:
    return write_corpus(file, ROWS, HEADER).read_bytes()


def test_what_is_written_has_the_documented_fields_and_is_read_back(tmp_path):
    with open_corpus(tmp_path / "corpus.jsonl") as file:
        file.begin(HEADER)
        for row in ROWS:
            file.append(row)
    assert read_rows(tmp_path / "corpus.jsonl") == ROWS
    with open_corpus(tmp_path / "corpus.jsonl") as file:
        assert (file.header, file.rows) == (HEADER, ROWS)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    header, first, second = map(json.loads, lines)
    assert header.keys() == {"format", "version", "model", "vocab_size", "tokenizer", "settings"}
    assert (header["format"], header["version"]) == ("dflash-corpus", 1)
    plain = {"id", "category", "p", "o", "t", "top_p", "seed", "finish"}
    assert first.keys() == plain
    assert second.keys() == plain | {"messages"}


def test_an_older_file_without_a_header_is_read(tmp_path):
    file = tmp_path / "old.jsonl.gz"
    file.write_bytes(gzip.compress((json.dumps(OLD) + "\n").encode() * 2))
    rows = read_rows(file, VOCAB_SIZE, LetterTokenizer("ba"))
    assert [(r.prompt, r.answer, r.temperature) for r in rows] == [((1, 2), (3,), 0.0)] * 2
    assert len({row.id for row in rows}) == 2


def row(**changes: object) -> str:
    return json.dumps({**OLD, **changes})


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "JSON"),
        ("[]", "no row"),
        ("{}", "'p' .* missing"),
        (row(t="hot"), "'t' .* 'hot'"),
        (row(p=[]), r"'p' .* \[\]"),
        (row(o=[-1]), r"'o' .* \[-1\]"),
        (row(o=[True]), r"'o' .* \[True\]"),
        (row(seed=0.5), "'seed' .* 0.5"),
        (row(messages=["hi"]), r"'messages' .* \['hi'\]"),
        (row(o=[VOCAB_SIZE]), "token 97, .* 97"),
    ],
)
def test_a_damaged_line_is_named_with_what_it_holds(tmp_path, line, named):
    file = tmp_path / "damaged.jsonl"
    file.write_bytes(write(file) + f"\n{line}\n{row()}\n".encode())
    with pytest.raises(DFlashError, match=named) as failure:
        read_rows(file)
    assert f"line 5 of {file}" in failure.value.what
    assert failure.value.next_step


@pytest.mark.parametrize(
    ("name", "contents", "named"),
    [
        ("c.jsonl", b"\n\n", "no rows"),
        ("c.jsonl", HEADER.as_line().encode(), "no rows"),
        ("c.jsonl", b'{"format": "dflash-corpus", "version": 2}\n', "'version': 2.* 'version': 1"),
        ("c.jsonl", HEADER.as_line().replace("97", "true").encode(), "'vocab_size' in line 1 .* T"),
        ("c.jsonl", b'{"format": "dflash-corpus", "version": 1}\n', "'model' in line 1 .* missing"),
        ("c.jsonl", b"\xff\xfe\x00\n{}\n", "line 1 "),
        ("cut.gz", gzip.compress(HEADER.as_line().encode())[:-12], "cut.gz cannot be read"),
        ("plain.gz", b"{}", "plain.gz cannot be read"),
        ("nowhere", None, "nowhere cannot be read"),
        (".", None, "cannot be read"),
    ],
)
def test_what_is_no_corpus_with_rows_is_refused(tmp_path, name, contents, named):
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(DFlashError, match=named) as failure:
        read_rows(tmp_path / name)
    assert str(tmp_path / name) in failure.value.what


# The growing file


def test_a_line_that_a_kill_cut_short_is_ignored_and_cut_off_before_the_next(tmp_path):
    file, line = tmp_path / "corpus.jsonl", ROWS[0].as_line().encode() + b"\n"
    whole, header = write(file), HEADER.as_line().encode() + b"\n"
    for kept, cut in ((b"", header), (header, line), (whole, line)):
        for length in (1, 12, 40, len(cut) - 2):
            file.write_bytes(kept + cut[:length])
            assert kept != whole or read_rows(file) == ROWS
            with open_corpus(file) as opened:
                opened.begin(HEADER)
                opened.append(ROWS[0])
            assert file.read_bytes() == (kept or header) + line


@pytest.mark.parametrize(
    ("name", "contents", "header", "named"),
    [
        ("notes", "my notes", HEADER, "notes exists"),
        ("notes", json.dumps(OLD) + "\n", HEADER, "notes exists"),
        ("notes", "\n", HEADER, "notes exists"),
        ("c", HEADER.as_line() + "\n", replace(HEADER, model="large"), "model 'tiny', not 'large'"),
        ("c", HEADER.as_line() + "\n", replace(HEADER, settings={"seed": 4}), "seed 3, not 4"),
        ("nowhere/c.jsonl", None, HEADER, "nowhere/c.jsonl cannot be written"),
        (".", None, HEADER, "cannot be written"),
        ("c.jsonl.gz", None, HEADER, "c.jsonl.gz"),
    ],
)
def test_a_file_that_cannot_be_continued_stays_as_it_is(tmp_path, name, contents, header, named):
    if contents is not None:
        (tmp_path / name).write_text(contents)
    with pytest.raises(DFlashError, match=named) as failure, open_corpus(tmp_path / name) as file:
        file.begin(header)
    assert str(tmp_path) in failure.value.what
    left = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert left == ({} if contents is None else {name: contents})


def test_only_one_process_writes_a_file_and_one_that_wrote_nothing_leaves_nothing(tmp_path):
    file = tmp_path / "corpus.jsonl"
    other = open_corpus(file)
    with open_corpus(file), pytest.raises(DFlashError, match="another process is writing"), other:
        pass
    assert not file.exists()
    with open_corpus(file) as opened:
        opened.begin(HEADER)
    assert file.exists()


def test_a_full_disk_leaves_whole_lines(tmp_path):
    file = tmp_path / "corpus.jsonl"
    before = write(file)
    with open_corpus(file) as opened:
        opened.begin(HEADER)
        with full_disk(len(before) + 30), pytest.raises(OSError):
            opened.append(ROWS[0])
        assert file.read_bytes() == before
        opened.append(ROWS[0])
    assert read_rows(file) == [*ROWS, ROWS[0]]
