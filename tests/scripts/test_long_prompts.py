"""Prompts with long texts before their questions."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path

import long_prompts
import pytest

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models.load import load_target
from dflash_mlx.session.templates import prompt_tokens
from dflash_mlx.train.corpus.rows import CorpusRow
from support.models import write_model

QUESTIONS = ["why?", "what is 1 + 1?", "how so?", "who?", "where?", "when?"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Prompts of 100 to 400 tokens, and the model that counted them."""
    root = tmp_path_factory.mktemp("long")
    model = write_model(root / "model", max_position_embeddings=1000)
    rows = [
        {"id": str(i), "category": "any", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(QUESTIONS)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [CorpusRow(str(i), "any", (1, 2), (7, 8, 9)).as_line() for i in range(len(rows))]
    (root / "answers.jsonl").write_text("\n".join(answers) + "\n")
    files = ["--prompts", str(root / "prompts.jsonl"), "--answers", str(root / "answers.jsonl")]
    lengths = ["--least", "100", "--most", "400", "--rows", "6"]
    out = root / "long.jsonl"
    long_prompts.main([*files, *lengths, "--model", str(model), "--out", str(out)])
    return model, [json.loads(line) for line in out.read_text().splitlines()]


def test_every_question_comes_last_behind_text_of_the_length_that_was_asked(made):
    model, rows = made
    tokenizer = load_target(str(model)).tokenizer
    lengths = [len(prompt_tokens(tokenizer, row["messages"])) for row in rows]
    assert max(lengths) <= 410 and sum(lengths) > 6 * 80  # a cut character can cost some tokens
    asked = sorted(row["messages"][-1]["content"].rpartition("\n\n")[2] for row in rows)
    assert asked == sorted(QUESTIONS)


def test_texts_name_package_and_licence_and_talks_take_turns(made):
    texts, talks = made[1][::2], made[1][1::2]
    assert all(long_prompts.LICENCES.search(row["source"]) for row in texts)
    assert all(len(row["messages"]) == 1 for row in texts)
    for row in talks:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert any(len(row["messages"]) > 1 for row in talks)


def test_licences_that_do_not_allow_it_are_told_apart():
    terms = {found.name: long_prompts.licence(found) for found in distributions()}
    assert long_prompts.LICENCES.search(terms["pytest"])
    for other in ("GPL-3.0-only", "Proprietary", "", "LIMITED"):
        assert not long_prompts.LICENCES.search(other)


def test_answers_to_other_prompts_and_lengths_that_cannot_be_are_refused(made, tmp_path):
    model, _ = made
    root = model.parent
    (tmp_path / "other.jsonl").write_text(CorpusRow("x", "any", (1,), (2,)).as_line() + "\n")
    files = ["--prompts", str(root / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    other = ["--answers", str(tmp_path / "other.jsonl"), "--model", str(model)]
    with pytest.raises(DFlashError, match="answers no prompt"):
        long_prompts.main([*files, *other])
    with pytest.raises(DFlashError, match="--least is 9 and --most 3"):
        long_prompts.main([*files, *other, "--least", "9", "--most", "3"])
    assert not (tmp_path / "out.jsonl").exists()
