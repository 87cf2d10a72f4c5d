"""Prompts are padded with the text of others, and the report says how long they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dflash_mlx.benchmark.selection import (
    describe_lengths,
    pad,
    questions,
    read_contexts,
)
from dflash_mlx.cli.prompts import QUESTIONS, read_prompts
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.session.templates import prompt_tokens
from support.models import write_model

TEXTS = ["how are you today?", "write a function", "a much longer question than the others", "2+2?"]
ROWS = [
    {"id": str(i), "category": "ab"[i % 2], "messages": [{"role": "user", "content": text}]}
    for i, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return load_tokenizer(folder)


def plain(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    return prompt_tokens(tokenizer, row["messages"], None, raw=False)


@pytest.mark.parametrize("length", [60, 333])
@pytest.mark.parametrize("row", ROWS[:2], ids=TEXTS[:2])
def test_a_padded_prompt_has_its_length_and_ends_in_its_own_question(tokenizer, row, length):
    tokens = pad(tokenizer, row, length, ROWS)
    assert length - 2 <= len(tokens) <= length  # a space at the filler's end is dropped
    text = tokenizer.decode(tokens)
    assert text.count(row["messages"][0]["content"]) == 1
    end = tokenizer.decode(plain(tokenizer, row))[len("<|im_start|>user\n") :]
    assert text.endswith("\n\n" + end)
    if row == ROWS[1] and length == 333:
        others = "\n\n".join([TEXTS[2], TEXTS[3], TEXTS[0]])
        assert text.startswith(f"<|im_start|>user\n{others}\n\n{others}")


def test_a_prompt_with_no_room_for_padding_stays_as_it_is_or_gets_less(tokenizer):
    own = plain(tokenizer, ROWS[0])
    for length in (1, len(own)):
        assert pad(tokenizer, ROWS[0], length, ROWS) == own
    for more in (1, 2, 3, 4):
        assert len(own) <= len(pad(tokenizer, ROWS[0], len(own) + more, ROWS)) <= len(own) + more


def test_a_short_source_pads_to_the_length_though_its_repetitions_share_tokens(tmp_path):
    folder = write_model(tmp_path / "model")
    file = folder / "tokenizer.json"
    contents = json.loads(file.read_text())
    contents["model"]["vocab"]["Ċa"] = 97  # one more
    contents["model"]["merges"] = [["Ċ", "a"]]
    file.write_text(json.dumps(contents))
    source = [{"messages": [{"role": "user", "content": "a"}]}]
    tokenizer = load_tokenizer(folder)
    assert 331 <= len(pad(tokenizer, ROWS[0], 333, source)) <= 333


@pytest.mark.parametrize(
    ("contexts", "categories", "ids"),
    [
        ([], ["a", "b"], ["0", "1"]),
        ([100], ["a", "b"], ["0", "1"]),
        ([40, 100], ["40 tokens", "100 tokens"] * 2, ["0", "0", "1", "1"]),
    ],
)
def test_one_context_keeps_the_categories_and_several_take_their_place(
    tokenizer, contexts, categories, ids
):
    found = questions(tokenizer, ROWS[:2], contexts, ROWS)
    assert [question.category for question in found] == categories
    assert [question.id for question in found] == ids
    if not contexts:
        assert [question.tokens for question in found] == [plain(tokenizer, r) for r in ROWS[:2]]


def test_the_lengths_say_what_was_reached(tokenizer):
    assert describe_lengths(questions(tokenizer, ROWS, [], ROWS))["asked"] == []
    found = questions(tokenizer, ROWS, [50, 120], ROWS)
    lengths = [len(question.tokens) for question in found]
    longer = sum(n > 50 for n in lengths[::2])
    assert 0 < longer < len(ROWS)
    told = {"asked": [50, 120], "longer_than_asked": longer}
    told |= {"shortest": min(lengths), "longest": max(lengths)}
    assert describe_lengths(found) == told


def test_what_cannot_be_padded_with_or_to_is_refused(tokenizer):
    with pytest.raises(DFlashError, match="no other prompt"):
        pad(tokenizer, ROWS[0], 100, [ROWS[0], dict(ROWS[0])])
    assert read_contexts(None) == []
    assert read_contexts("128, 4096") == [128, 4096]
    for text in ("", "0", "-4", "many", "128,", "²"):
        with pytest.raises(DFlashError, match="context is"):
            read_contexts(text)


# Published data sets: their fields, and what is asked

PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k.jsonl": ({"question": "2+2?", "answer": "#### 4"}, "2+2?"),
    "math500.jsonl": ({"problem": "Solve.", "answer": "1", "unique_id": "test/1.json"}, "Solve."),
    "humaneval.jsonl": ({"task_id": "HumanEval/0", "prompt": "def f():"}, "def f():"),
    "mbpp.jsonl": ({"text": "Write a function.", "code": "f", "task_id": 7}, "Write a function."),
    "sanitized-mbpp.json": ({"prompt": "Write another.", "task_id": 8}, "Write another."),
    "livecodebench.jsonl": ({"question_content": "Sort.", "question_id": "a"}, "Sort."),
    "leetcode.jsonl": (
        {"question_content": "Sort.", "starter_code": "class Solution:", "question_id": "b"},
        "Sort.\n\nclass Solution:",
    ),
    "mt-bench.jsonl": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        "Write.",
    ),
    "mt_bench_prompts.jsonl": (
        {"category": "writing", "prompt": ["Write.", "Rewrite."], "prompt_id": 81},
        "Write.",
    ),
    "alpaca_data.json": (
        {"instruction": "Translate.", "input": "Bonjour", "output": "Hello", "text": "Below is"},
        "Translate.\n\nBonjour",
    ),
    "alpaca.json": ({"instruction": "Say hello.", "input": "", "output": "Hello"}, "Say hello."),
}


def write_published(file: Path, *rows: dict[str, Any]) -> Path:
    """A list in a .json file, lines in any other."""
    text = json.dumps(rows, indent=1)
    if file.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_data_sets_are_read_as_they_are(tmp_path, name):
    row, asked = PUBLISHED[name]
    first, second = read_prompts(write_published(tmp_path / name, row, row))
    assert first == second
    assert first["messages"] == [{"role": "user", "content": asked}]
    assert first["category"] == name.partition(".")[0]
    numbers = {str(value) for key, value in row.items() if key.endswith("_id")}
    assert first["id"] in (numbers or {""})


def test_a_folder_of_data_sets_is_one_benchmark(tmp_path, tokenizer):
    for name, (row, _) in PUBLISHED.items():
        write_published(tmp_path / name, row)
    (tmp_path / "README.md").write_text("no data")
    write_published(tmp_path / "own.jsonl", ROWS[0])
    rows = read_prompts(tmp_path)
    assert {row["category"] for row in rows} == {*(n.partition(".")[0] for n in PUBLISHED), "a"}
    assert len(questions(tokenizer, rows, [], rows)) == len(PUBLISHED) + 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(DFlashError, match="holds no .json or .jsonl files"):
        read_prompts(tmp_path / "empty")


def test_rows_of_ours_stay_as_they_are_whatever_they_hold_and_both_may_be_in_one_list(tmp_path):
    odd = {**ROWS[0], "messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    (tmp_path / "odd.jsonl").write_text(json.dumps(odd, ensure_ascii=False) + "\n", "utf-8")
    assert read_prompts(tmp_path / "odd.jsonl") == [odd]
    own = [ROWS[0], {"category": "b", "prompt": "hello", "question": "no"}]
    found = read_prompts(write_published(tmp_path / "x.json", *own, {"question": "2+2?"}))
    assert [row["category"] for row in found] == ["a", "b", "x"]
    assert [row["messages"][0]["content"] for row in found] == [TEXTS[0], "hello", "2+2?"]


GOOD = '{"question": "2+2?"}\n'
KNOWN = ("messages", *QUESTIONS)
BAD = {
    "": ["holds no prompts"],
    "[]": ["holds no prompts"],
    "hello\n": ["line 1 of", "is not JSON"],
    GOOD + "{\n": ["line 2 of", "is not JSON"],
    GOOD + "\n[]\n": ["line 3 of", "has no category"],
    "[{]": ["is not a list in JSON"],
    "[1]": ["entry 1 of", "no category"],
    '{"category": null, "prompt": "a"}': ["line 1 of", "has no category"],
    '{"category": "chat"}': ["line 1 of", "has the fields category", *KNOWN],
    '{"category": "a", "messages": [{"role": "user"}]}': ["message 1 in line 1"],
    GOOD + '{"premise": "a", "hypothesis": "b"}': ["line 2", "fields premise, hypothesis", *KNOWN],
    GOOD + '{"question": {"text": "nested"}}': ["line 2 of", "has the fields question", *KNOWN],
    GOOD + '{"turns": [["nested"]]}': ["line 2 of", "has the fields turns", *KNOWN],
    GOOD + '{"question": "", "answer": "4"}': ["has the fields question, answer", *KNOWN],
    GOOD + "{}": ["line 2 of", "has the fields", *KNOWN],
}


@pytest.mark.parametrize("contents", BAD)
def test_damaged_files_and_rows_of_unknown_fields_are_refused_with_what_they_have(
    tmp_path, contents
):
    (tmp_path / "x.jsonl").write_text(contents)
    with pytest.raises(DFlashError, match="x.jsonl") as failure:
        read_prompts(tmp_path / "x.jsonl")
    assert [part for part in BAD[contents] if part not in str(failure.value)] == []
