"""Corpus files, whose damage is refused with its line; user turns that the model writes itself."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mlx import Pair, load
from dflash_mlx import corpus as collect
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.answers import Job, TurnTemplate, TurnWriter
from dflash_mlx.train.config import CorpusConfig
from dflash_mlx.train.rows import (
    CorpusHeader,
    CorpusRow,
    open_corpus,
    read_rows,
    tokenizer_fingerprint,
)
from support.families import VOCAB_SIZE
from support.models import EOS, TEMPLATE, write_model
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


def behind(line: str) -> bytes:
    """A file in which a line stands behind good ones."""
    lines = [HEADER.as_line(), *(each.as_line() for each in ROWS), "", line, row(), ""]
    return "\n".join(lines).encode()


def row(**changes: object) -> str:
    return json.dumps({**OLD, **changes})


@pytest.mark.parametrize(
    ("name", "contents", "named"),
    [
        ("c.jsonl", behind("{"), "line 5 .* is not JSON"),
        ("c.jsonl", behind("[]"), "line 5 .* is not a row"),
        ("c.jsonl", behind("{}"), "'p' in line 5 .* missing"),
        ("c.jsonl", behind(row(t="hot")), "'t' in line 5 .* 'hot'"),
        ("c.jsonl", behind(row(p=[])), r"'p' in line 5 .* \[\]"),
        ("c.jsonl", behind(row(o=[-1])), r"'o' in line 5 .* \[-1\]"),
        ("c.jsonl", behind(row(o=[True])), r"'o' in line 5 .* \[True\]"),
        ("c.jsonl", behind(row(seed=0.5)), "'seed' in line 5 .* 0.5"),
        ("c.jsonl", behind(row(messages=["hi"])), r"'messages' in line 5 .* \['hi'\]"),
        ("c.jsonl", behind(row(o=[VOCAB_SIZE])), "line 5 .* token 97, .* 97"),
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
    assert str(tmp_path / name) in failure.value.what and failure.value.next_step


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


OPENINGS = ("Say ", "def f():\n\n")
# As Llama 2's: no token of its own ends the user's turn.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% elif m['role'] == 'system' %}<<{{ m['content'] }}>>{% endif %}{% endfor %}"
)
SHOUTING = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
REFUSING = "{{ raise_exception('System role not supported') }}"
STRICT = "{% if messages[0]['role'] == 'system' %}" + REFUSING + "{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("self")
    write_model(root / "model")
    write_model(root / "plain", template=PLAIN_TEMPLATE)
    return root


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return load(str(folder / "model"))


def run(folder: Path, out: Path, wanted: int, *more: str) -> list[CorpusRow]:
    words = ["--model", str(folder / "model"), "--out", str(out), "--self-prompt", str(wanted)]
    words += ["--max-tokens", "4", "--batch-size", "6", "--self-max-tokens", "60"]
    collect.main([*words, *more])
    return read_rows(out)


WITH_OPENINGS = [option for opening in OPENINGS for option in ("--opening", opening)]


@pytest.fixture(scope="module")
def asked(folder: Path) -> list[CorpusRow]:
    return run(folder, folder / "asked.jsonl", 6, *WITH_OPENINGS)


def number(row: CorpusRow) -> int:
    return int(row.id.removeprefix("self-0-"))


def text_of(row: CorpusRow) -> str:
    return row.messages[0]["content"]


def test_as_many_turns_as_wanted_continue_the_openings_in_turn_and_are_answered(asked, pair):
    assert len({row.id for row in asked}) == len({text_of(row) for row in asked}) == 6
    for row in asked:
        expected = pair.tokenizer.apply_chat_template(
            list(row.messages), add_generation_prompt=True
        )
        assert row.prompt == tuple(expected)
        assert [message["role"] for message in row.messages] == ["user"]
        assert row.category == "self"
        begin = OPENINGS[number(row) % 2].rstrip(" ")
        assert text_of(row).startswith(begin) and len(text_of(row)) > len(begin)
    assert {number(row) % 2 for row in asked} == {0, 1}


def test_bad_turns_are_replaced_and_counted(folder, tmp_path, capsys):
    rows = run(folder, tmp_path / "c", 3, "--self-max-tokens", "25")
    assert len(rows) == 3 and max(map(number, rows)) >= 3
    assert "user turns were empty, too long or not new" in capsys.readouterr().out


def test_a_stopped_run_goes_on_with_the_same_turns_and_may_be_asked_for_more(
    folder, tmp_path, asked
):
    whole = (folder / "asked.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "c").write_bytes(b"".join(whole[:4]) + whole[4][:30])
    rows = run(folder, tmp_path / "c", 7, *WITH_OPENINGS)
    assert len({row.id for row in rows}) == len({text_of(row) for row in rows}) == 7
    assert rows[:3] == asked[:3]
    again = {row.id: row for row in asked}
    both = [row for row in rows[3:] if row.id in again]
    assert both and [again[row.id] for row in both] == both


def writer(pair: Pair, rows: tuple[CorpusRow, ...] = ()) -> TurnWriter:
    return TurnWriter(pair, CorpusConfig(self_prompt=4, opening=("Say",)), rows)


def written(turns: TurnWriter, pair: Pair, text: str, finish: str = "stop") -> Job:
    (job,) = turns.start(1)
    return replace(job, tokens=pair.tokenizer.encode(text, add_special_tokens=False), finish=finish)


def test_a_turn_is_good_once_and_one_that_is_empty_unfinished_or_too_long_never(pair):
    turns = writer(pair)
    prompt = turns.prompt(written(turns, pair, " it!<|im_end|>"))
    assert prompt is not None and prompt.messages[0]["content"] == "Say it!"
    no_good = [(" it! \n<|im_end|>", "stop"), (" \n<|im_end|>", "stop"), (" it", "length")]
    no_good += [(" it it it", "loop"), (" it<|pad|> now<|im_end|>", "stop")]
    for said in [*no_good, ("x" * 600 + "<|im_end|>", "stop")]:
        assert turns.prompt(written(turns, pair, *said)) is None
    row = CorpusRow("self-9-0", "self", (5,), (5,), 0.0, messages=prompt.messages)
    resumed = writer(pair, (row, replace(row, id="self-0-0"), replace(row, id="self-0-2")))
    assert [job.key for job in resumed.start(2)] == [1, 3], "the numbers that the file lacks"
    assert resumed.prompt(written(resumed, pair, " it!<|im_end|>")) is None
    assert (turns.rejected, resumed.rejected) == (6, 1)


# Chat templates


def test_the_template_is_cut_at_the_users_text_whose_end_may_be_plain_text(pair, folder):
    template = TurnTemplate(pair.tokenizer, "Be brief.")
    begin = "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nSay"
    assert pair.tokenizer.decode(template.prompt("Say")) == begin
    assert template.stops == {EOS}
    tokenizer = load(str(folder / "plain")).tokenizer
    template = TurnTemplate(tokenizer, None)
    assert tokenizer.decode(template.prompt("Say")) == "[INST] Say"
    tokens = tokenizer.encode(" it! [/INST] Yes", add_special_tokens=False)
    assert template.text("Say", tokens, "length") == "Say it!"
    assert template.text("Say", tokens[:8], "length") is None


@pytest.mark.parametrize(
    ("template", "system", "said"),
    [
        (SHOUTING, None, "changes the user's text"),
        (None, None, "has no chat template"),
        (STRICT, "Be brief.", "System role not supported"),
    ],
)
def test_a_template_without_a_place_for_what_is_asked_is_refused(tmp_path, template, system, said):
    tokenizer = load(str(write_model(tmp_path / "model", template=template))).tokenizer
    with pytest.raises(DFlashError, match=said) as failure:
        TurnTemplate(tokenizer, system)
    assert "--prompts" in failure.value.next_step
    if system is not None:
        TurnTemplate(tokenizer, None)


def test_openings_come_from_a_file_too_and_bad_ones_are_refused(folder, tmp_path):
    file = tmp_path / "o.json"
    file.write_text(json.dumps(["x\ny"]))
    (row,) = run(folder, tmp_path / "c", 1, "--openings", str(file))
    assert text_of(row).startswith("x\ny")
    for contents in ("{", "[]", '"Say"', "[1]"):
        file.write_text(contents)
        with pytest.raises(DFlashError, match="o.json"):
            run(folder, tmp_path / "c", 1, "--openings", str(file))
    with pytest.raises(DFlashError, match="fills the context"):
        run(folder, tmp_path / "d", 1, "--opening", "x" * 600)
    always = ["--self-max-tokens", "9", "--self-temperature", "0.001", "--opening", "Say"]
    with pytest.raises(DFlashError, match="user turns that the model wrote.*more openings"):
        run(folder, tmp_path / "e", 3, *always)
