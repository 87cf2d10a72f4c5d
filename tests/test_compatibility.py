"""What is refused before any weight is read: each sentence, with file, field and both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from dflash_mlx.compatibility import Finding, check_drafter, check_pair, check_target
from families import make_model
from test_load import edit_config, write_drafter, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter")


def errors(folder: Path, check: Any = check_target) -> list[Finding]:
    return list(check(folder).errors)


# What is right


def test_a_pair_that_fits_has_facts_and_no_findings(model, drafter):
    target, drafted = check_target(model), check_drafter(drafter)
    report = check_pair(target, drafted)
    assert report.findings == ()
    report.raise_first()
    parameters: Any = tree_flatten(make_model("llama").parameters())
    assert target.weights.parameters == sum(array.size for _, array in parameters)
    assert target.context_length == 512
    assert target.weights.dtype == "float32"
    assert target.weights.stored_bytes == 4 * target.weights.parameters
    assert report.memory(True) > target.weights.stored_bytes + drafted.weights.stored_bytes


# What is not


def test_numbers_that_do_not_fit_are_each_named_with_both_values(model, drafter):
    edit_config(model, vocab_size=98, num_hidden_layers=4)
    found = check_pair(check_target(model), check_drafter(drafter)).errors
    assert [(f.field, f.found, f.expected) for f in found[:2]] == [
        ("vocab_size", "97", "98"),
        ("num_hidden_layers", "3", "4"),
    ]
    assert f"made for a target with vocab_size 97, but {model} has 98" in str(found[0])


def test_the_wrong_way_round_is_said_of_both(model, drafter):
    (first,), (second,) = errors(drafter), errors(model, check_drafter)
    assert str(first).startswith(f"{drafter} is a drafter, not a target; give it with --drafter")
    assert str(second).startswith(f"{model} is a target, not a drafter; give it with --model")
