"""Corpus files: what is written is read back, and what is damaged is refused with its line."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.corpus.rows import (
    CorpusHeader,
    CorpusRow,
    check_header,
    read_rows,
    tokenizer_fingerprint,
)
from dflash_mlx.train.corpus.writer import CorpusFile
from support.tiny_training import full_disk

VOCAB_SIZE = 97
MESSAGES = ({"role": "user", "content": "a\u2028b"},)
ROWS = [
    CorpusRow("one", "math", (1, 2, 96), (4, 1), 0.0, finish="stop"),
    CorpusRow("two", "chat", (3,), (5, 6, 7), 0.6, 0.95, 2**32 - 1, "length", MESSAGES),
]
OLD = {"p": [1, 2], "o": [3], "t": 0.0}


class Words:
    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


HEADER = CorpusHeader("tiny", VOCAB_SIZE, tokenizer_fingerprint(Words("a", "b")), {"seed": 3})


def write(file: Path, *lines: str) -> Path:
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def corpus(file: Path, *more: str) -> Path:
    return write(file, HEADER.as_line(), *(row.as_line() for row in ROWS), *more)


def test_what_is_written_has_the_documented_fields_and_is_read_back(tmp_path):
    with CorpusFile(tmp_path / "corpus.jsonl") as file:
        file.begin(HEADER)
        for row in ROWS:
            file.append(row)
    assert read_rows(tmp_path / "corpus.jsonl") == (HEADER, ROWS)
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
    header, rows = read_rows(file, VOCAB_SIZE)
    assert header is None
    assert [(r.prompt, r.answer, r.temperature) for r in rows] == [((1, 2), (3,), 0.0)] * 2
    assert len({row.id for row in rows}) == 2


def test_a_last_line_that_a_kill_cut_short_is_ignored(tmp_path):
    whole = corpus(tmp_path / "whole.jsonl").read_bytes()
    last = ROWS[1].as_line().encode()
    for length in (1, 20, len(last) - 1):
        (tmp_path / "cut.jsonl").write_bytes(whole + last[:length])
        assert read_rows(tmp_path / "cut.jsonl") == (HEADER, ROWS)


def row(**changes: object) -> str:
    return json.dumps({**OLD, **changes})


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "JSON"),
        ("[]", "no row"),
        ("{}", "'p' .* missing"),
        (row(t="hot"), "'t' .* 'hot'"),
        (row(top_p=None), "'top_p' .* missing"),
        (row(p=[]), r"'p' .* \[\]"),
        (row(o=[1.0]), r"'o' .* \[1.0\]"),
        (row(o=[-1]), r"'o' .* \[-1\]"),
        (row(o=[True]), r"'o' .* \[True\]"),
        (row(id=3), "'id' .* 3"),
        (row(seed=0.5), "'seed' .* 0.5"),
        (row(messages=["hi"]), r"'messages' .* \['hi'\]"),
        (row(o=[VOCAB_SIZE]), "token 97, .* 97"),
    ],
)
def test_a_damaged_line_is_named_with_what_it_holds(tmp_path, line, named):
    file = corpus(tmp_path / "damaged.jsonl", "", line, ROWS[0].as_line())
    with pytest.raises(DFlashError, match=named) as failure:
        read_rows(file)
    assert f"line 5 of {file}" in failure.value.what
    assert failure.value.next_step


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        (b"\n\n", "no rows"),
        (HEADER.as_line().encode(), "no rows"),
        (b'{"format": "parquet"}\n', "'parquet', version None"),
        (b'{"format": "dflash-corpus", "version": 2}\n', "version 2, .* version 1"),
        (HEADER.as_line().replace("97", "true").encode(), "'vocab_size' in line 1 .* True"),
        (b'{"format": "dflash-corpus", "version": 1}\n', "'model' in line 1 .* missing"),
        (b"\xff\xfe\x00\n{}\n", "line 1 "),
    ],
)
def test_a_file_without_rows_or_of_another_format_is_refused(tmp_path, contents, named):
    (tmp_path / "corpus.jsonl").write_bytes(contents)
    with pytest.raises(DFlashError, match=named):
        read_rows(tmp_path / "corpus.jsonl")


def test_what_cannot_be_read_is_refused(tmp_path):
    whole = gzip.compress(corpus(tmp_path / "c.jsonl").read_bytes())
    (tmp_path / "cut.gz").write_bytes(whole[:-12])
    (tmp_path / "plain.gz").write_text("{}")
    for file in (tmp_path / "cut.gz", tmp_path / "plain.gz", tmp_path / "nowhere", tmp_path):
        with pytest.raises(DFlashError) as failure:
            read_rows(file)
        assert str(file) in failure.value.what


def test_a_corpus_of_another_tokenizer_is_refused():
    check_header(HEADER, Words("a", "b"), VOCAB_SIZE)
    check_header(None, Words("b", "a"), 5)
    with pytest.raises(DFlashError, match="tiny.* 97 .* 98"):
        check_header(HEADER, Words("a", "b"), 98)
    with pytest.raises(DFlashError, match="c.jsonl .*tiny.* other tokens"):
        check_header(HEADER, Words("b", "a"), VOCAB_SIZE, "c.jsonl")


# The growing file


def open_for(file: Path, header: CorpusHeader = HEADER) -> CorpusFile:
    corpus_file = CorpusFile(file)
    corpus_file.begin(header)
    return corpus_file


def test_a_line_that_a_kill_cut_short_is_cut_off_before_the_next(tmp_path):
    whole = corpus(tmp_path / "corpus.jsonl").read_bytes()
    header = HEADER.as_line().encode() + b"\n"
    for kept in (b"", header, whole):
        cut = (header if kept == b"" else ROWS[0].as_line().encode() + b"\n")[:-1]
        for length in (1, 12, 40, len(cut)):
            (tmp_path / "corpus.jsonl").write_bytes(kept + cut[:length])
            with open_for(tmp_path / "corpus.jsonl") as opened:
                opened.append(ROWS[0])
            expected = (kept or header) + ROWS[0].as_line().encode() + b"\n"
            assert (tmp_path / "corpus.jsonl").read_bytes() == expected


@pytest.mark.parametrize("contents", ["my notes", json.dumps(OLD) + "\n", "\n"])
def test_a_file_that_is_no_corpus_stays_as_it_is(tmp_path, contents):
    file = tmp_path / "notes"
    file.write_text(contents)
    with pytest.raises(DFlashError, match="notes exists"):
        open_for(file)
    assert file.read_text() == contents


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "large"}, "model 'tiny', not 'large'"),
        ({"vocab_size": 98}, "97, not 98"),
        ({"settings": {"seed": 4}}, "seed 3, not 4"),
        ({"settings": {}}, "seed 3, not None"),
    ],
)
def test_a_file_of_another_model_or_other_settings_is_not_continued(tmp_path, changes, named):
    file = corpus(tmp_path / "corpus.jsonl")
    before = file.read_bytes()
    with pytest.raises(DFlashError, match=named), CorpusFile(file) as opened:
        opened.begin(replace(HEADER, **changes))
    assert file.read_bytes() == before


def test_only_one_process_writes_a_file(tmp_path):
    file = tmp_path / "corpus.jsonl"
    with open_for(file), pytest.raises(DFlashError, match="another process is writing"):
        CorpusFile(file)
    open_for(file).close()


def test_a_full_disk_leaves_whole_lines(tmp_path):
    file = corpus(tmp_path / "corpus.jsonl")
    before = file.read_bytes()
    with open_for(file) as opened:
        with full_disk(len(before) + 30), pytest.raises(OSError):
            opened.append(ROWS[0])
        assert file.read_bytes() == before
        opened.append(ROWS[0])
    assert read_rows(file)[1] == [*ROWS, ROWS[0]]


@pytest.mark.parametrize("name", ["nowhere/c.jsonl", ".", "c.jsonl.gz"])
def test_what_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(DFlashError) as failure:
        CorpusFile(tmp_path / name)
    assert str(tmp_path / name) in failure.value.what and failure.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    CorpusFile(tmp_path / "c.jsonl").close()
    assert list(tmp_path.iterdir()) == []
