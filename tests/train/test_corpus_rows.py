"""Corpus files: what is written is read back, and what is damaged is refused with its line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.corpus.rows import CorpusHeader, CorpusRow, check_header, tokenizer_fingerprint, read_rows
from dflash_mlx.train.corpus.writer import CorpusFile

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


def test_what_is_written_is_read_back(tmp_path):
    with CorpusFile(tmp_path / "corpus.jsonl") as file:
        file.begin(HEADER)
        for row in ROWS:
            file.append(row)
    assert read_rows(tmp_path / "corpus.jsonl") == (HEADER, ROWS)


def test_the_lines_have_the_documented_fields(tmp_path):
    header, first, second = map(json.loads, corpus(tmp_path / "c").read_text().splitlines())
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
    ("line", "message"),
    [
        ("{", "line 4 of .* is no JSON"),
        ("[]", "line 4 of .* is no row"),
        ("7", "line 4 of .* is no row"),
        ("{}", "field 't' in line 4 of .* is missing"),
        (row(t="hot"), "field 't' in line 4 of .* is 'hot'"),
        (row(t=True), "field 't' in line 4 of .* is True"),
        (row(top_p=None), "field 'top_p' in line 4 of .* is missing"),
        (row(p=[]), r"field 'p' in line 4 of .* is \[\]"),
        (row(o=None), "field 'o' in line 4 of .* is missing"),
        (row(o=[1.0]), r"field 'o' in line 4 of .* is \[1.0\]"),
        (row(o=[-1]), r"field 'o' in line 4 of .* is \[-1\]"),
        (row(o="12"), "field 'o' in line 4 of .* is '12'"),
        (row(o=[True]), r"field 'o' in line 4 of .* is \[True\]"),
        (row(id=3), "field 'id' in line 4 of .* is 3"),
        (row(seed=0.5), "field 'seed' in line 4 of .* is 0.5"),
        (row(messages=["hi"]), r"field 'messages' in line 4 of .* is \['hi'\]"),
        (row(o=[VOCAB_SIZE]), "line 4 of .* holds the token 97, .* has only 97"),
        (row(p=[5, 50000, 5]), "line 4 of .* holds the token 50000, .* has only 97"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    file = corpus(tmp_path / "damaged.jsonl", line, ROWS[0].as_line())
    with pytest.raises(DFlashError, match=message) as failure:
        read_rows(file)
    assert str(file) in failure.value.what
    assert failure.value.next_step


def test_a_damaged_line_behind_a_blank_one_is_named_by_its_own_number(tmp_path):
    with pytest.raises(DFlashError, match="line 6 of"):
        read_rows(corpus(tmp_path / "damaged.jsonl", "", "", row(o=[VOCAB_SIZE])))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "holds no rows"),
        (b"\n\n", "holds no rows"),
        (HEADER.as_line().encode(), "holds no rows"),
        (b'{"format": "parquet"}\n', "the format 'parquet', version None"),
        (b'{"format": "dflash-corpus", "version": 2}\n', "version 2, instead of .* version 1"),
        (b'{"format": "dflash-corpus", "version": 1}\n', "field 'model' in line 1 .* missing"),
        (b"\xff\xfe\x00\n{}\n", "line 1 of .* is no JSON"),
    ],
)
def test_a_file_without_rows_or_of_another_format_is_refused(tmp_path, contents, message):
    (tmp_path / "corpus.jsonl").write_bytes(contents)
    with pytest.raises(DFlashError, match=message):
        read_rows(tmp_path / "corpus.jsonl")


def test_what_cannot_be_read_is_refused(tmp_path):
    whole = gzip.compress(corpus(tmp_path / "c.jsonl").read_bytes())
    (tmp_path / "cut.gz").write_bytes(whole[:-12])
    (tmp_path / "plain.gz").write_text("{}")
    for name in ("cut.gz", "plain.gz", "nowhere.jsonl", "."):
        with pytest.raises(DFlashError, match=f"{re.escape(name)} cannot be read"):
            read_rows(tmp_path / name if name != "." else Path("."))


def test_a_corpus_of_another_tokenizer_is_refused():
    check_header(HEADER, Words("a", "b"), VOCAB_SIZE)
    check_header(None, Words("b", "a"), 5)
    with pytest.raises(DFlashError, match="made with tiny, whose vocabulary has 97 .* has 98"):
        check_header(HEADER, Words("a", "b"), 98)
    with pytest.raises(DFlashError, match=r"c.jsonl was made with tiny.* other tokens"):
        check_header(HEADER, Words("b", "a"), VOCAB_SIZE, "c.jsonl")


# The growing file


def open_for(file: Path, header: CorpusHeader = HEADER) -> CorpusFile:
    corpus_file = CorpusFile(file)
    corpus_file.begin(header)
    return corpus_file


def test_rows_join_those_that_are_there(tmp_path):
    file = corpus(tmp_path / "corpus.jsonl")
    with open_for(file) as opened:
        assert opened.rows == ROWS
        opened.append(ROWS[0])
    assert read_rows(file) == (HEADER, [*ROWS, ROWS[0]])


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


@pytest.mark.parametrize(
    "contents",
    [
        "my notes",
        "my notes\n",
        json.dumps(OLD) + "\n",
        json.dumps({"id": 1, "category": "chat", "messages": []}) + "\n",
        "\n",
    ],
)
def test_a_file_that_is_no_corpus_stays_as_it_is(tmp_path, contents):
    file = tmp_path / "notes"
    file.write_text(contents)
    with pytest.raises(DFlashError, match="notes exists and does not begin as a corpus does"):
        open_for(file)
    assert file.read_text() == contents


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (CorpusHeader("large", VOCAB_SIZE, HEADER.tokenizer, {"seed": 3}), "model 'tiny', not 'large'"),
        (CorpusHeader("tiny", VOCAB_SIZE, "0", {"seed": 3}), "tokenizer '.*', not '0'"),
        (CorpusHeader("tiny", 98, HEADER.tokenizer, {"seed": 3}), "a vocabulary of 97, not 98"),
        (CorpusHeader("tiny", VOCAB_SIZE, HEADER.tokenizer, {"seed": 4}), "seed 3, not 4"),
        (CorpusHeader("tiny", VOCAB_SIZE, HEADER.tokenizer, {}), "seed 3, not None"),
    ],
)
def test_a_file_of_another_model_or_other_settings_is_not_continued(tmp_path, other, message):
    file = corpus(tmp_path / "corpus.jsonl")
    before = file.read_bytes()
    with pytest.raises(DFlashError, match=message), CorpusFile(file) as opened:
        opened.begin(other)
    assert file.read_bytes() == before


def test_only_one_process_writes_a_file(tmp_path):
    file = tmp_path / "corpus.jsonl"
    with open_for(file), pytest.raises(DFlashError, match="another process is writing"):
        CorpusFile(file)
    open_for(file).close()


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    file = corpus(tmp_path / "corpus.jsonl")
    before = file.read_bytes()
    write_all = __import__("os").write
    left = [30]

    def write_some(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        written = write_all(descriptor, data[: left[0]])
        left[0] -= written
        return int(written)

    with open_for(file) as opened:
        monkeypatch.setattr("os.write", write_some)
        with pytest.raises(OSError, match="No space"):
            opened.append(ROWS[0])
        assert file.read_bytes() == before
        monkeypatch.undo()
        opened.append(ROWS[0])
    assert read_rows(file)[1] == [*ROWS, ROWS[0]]


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(DFlashError, match="nowhere/c.jsonl cannot be written .*No such file"):
        CorpusFile(tmp_path / "nowhere" / "c.jsonl")
    with pytest.raises(DFlashError, match="cannot be written .*directory"):
        CorpusFile(tmp_path)
    with pytest.raises(DFlashError, match="gzip it later"):
        CorpusFile(tmp_path / "c.jsonl.gz")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    CorpusFile(tmp_path / "c.jsonl").close()
    assert list(tmp_path.iterdir()) == []
