"""User turns that the model writes itself, through any chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_mlx import Pair, load
from dflash_mlx import corpus as collect
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.train.answers import Job, TurnTemplate, TurnWriter
from dflash_mlx.train.config import CorpusConfig
from dflash_mlx.train.rows import CorpusRow, read_rows
from support.models import EOS, TEMPLATE, write_model

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


# Which turns are good


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
