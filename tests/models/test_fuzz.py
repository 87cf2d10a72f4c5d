"""Damaged configurations, headers and tokenizers end in a sentence or in a right model.

The cases of one seed; `scripts/fuzz.py` runs all 10,000 of it, or others.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import load_network, read_config
from support import fuzzing
from support.fuzz_driver import GOOD, outcomes
from support.models import write_drafter

CASES = 600
SEED = 20261121


def test_every_damaged_folder_is_refused_in_a_sentence_or_loads_as_it_is():
    found = list(outcomes(SEED, 0, CASES))
    assert [case for case in found if case["outcome"] not in GOOD] == []
    assert len(found) == CASES
    assert {case["outcome"] for case in found} == set(GOOD)
    assert len({case["subject"] for case in found}) == 15


# That faults would be seen


def fail() -> None:
    raise KeyError("a")


def say(what: str) -> Callable[[], None]:
    def refuse() -> None:
        raise DFlashError(what, "download it again")

    return refuse


@pytest.mark.parametrize(
    ("load", "outcome"),
    [
        (fail, "KeyError"),
        (lambda: bytearray(2 * fuzzing.ALLOWED), "memory"),
        (lambda: mx.eval(mx.zeros(fuzzing.ALLOWED // 2)), "memory"),
        (say("first\nsecond, of --drafter"), "unclear"),
        (say("it is damaged"), "unclear"),
        (say("what --drafter names is damaged"), "refused"),
        (lambda: None, "loaded"),
    ],
)
def test_what_is_neither_a_sentence_nor_a_right_model_is_a_fault(tmp_path, load, outcome):
    subject = fuzzing.Subject("any", {}, "", lambda folder: load())
    assert fuzzing._outcome(subject, tmp_path, fuzzing.ALLOWED)["outcome"] == outcome


def test_a_model_with_other_numbers_than_its_file_is_no_right_model(tmp_path):
    folder = write_drafter(tmp_path)
    network = load_network(folder, read_config(folder), mx.float32)
    fuzzing._same(network, folder)
    network.norm.weight = network.norm.weight + 1
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        fuzzing._same(network, folder)
