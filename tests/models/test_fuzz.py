"""Damaged configurations, headers and tokenizers end in a sentence or in a right model.

The cases of one seed; `scripts/fuzz.py` runs all 10,000 of it, or others.
"""

from __future__ import annotations

import signal
from unittest.mock import Mock

import mlx.core as mx
import pytest

from dflash_mlx import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from support import fuzzing
from support.fuzzing import GOOD, outcomes
from support.models import write_drafter

CASES = 300
SEED = 20261121


def test_every_damaged_folder_is_refused_in_a_sentence_or_loads_as_it_is():
    found = list(outcomes(SEED, 0, CASES))
    assert [case for case in found if case["outcome"] not in GOOD] == []
    assert len(found) == CASES
    assert {case["outcome"] for case in found} == set(GOOD)
    assert len({case["subject"] for case in found}) == 31


# That faults would be seen


def say(what: str) -> Mock:
    return Mock(side_effect=DFlashError(what, "download it again"))


@pytest.mark.parametrize(
    ("load", "outcome"),
    [
        (Mock(side_effect=KeyError("a")), "KeyError"),
        (lambda folder: bytearray(2 * fuzzing.ALLOWED), "memory"),
        (lambda folder: mx.eval(mx.zeros(fuzzing.ALLOWED // 2)), "memory"),
        (lambda folder: signal.pause(), "hang"),
        (say("first\nsecond, of --drafter"), "unclear"),
        (say("it is damaged"), "unclear"),
        (say("what --drafter names is damaged"), "refused"),
        (lambda folder: None, "loaded"),
    ],
)
def test_all_but_sentences_and_right_models_are_faults(tmp_path, monkeypatch, load, outcome):
    monkeypatch.setattr(fuzzing, "SECONDS", 1 if outcome == "hang" else 20)
    subject = fuzzing.Subject("any", {}, "", load)
    assert fuzzing._outcome(subject, tmp_path, fuzzing.ALLOWED)["outcome"] == outcome


def test_a_case_that_ends_its_process_is_a_crash_and_the_others_go_on(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys\n"
        "for case in range(int(sys.argv[2]), int(sys.argv[3])):\n"
        "    print(json.dumps({'begin': case}), flush=True)\n"
        "    os.abort() if case == 2 else None\n"
        "    print(json.dumps({'case': case, 'outcome': 'loaded'}), flush=True)\n"
    )
    monkeypatch.setattr(fuzzing, "PROGRAM", [str(program)])
    found = [case["outcome"] for case in outcomes(0, 0, 5)]
    assert found == ["loaded", "loaded", "crash", "loaded", "loaded"]


def test_a_model_with_other_numbers_than_its_file_is_no_right_model(tmp_path):
    folder = write_drafter(tmp_path)
    network = FILES.load_network(folder, FILES.read_drafter(folder).config, mx.float32)
    fuzzing._same(network, folder)
    network.norm.weight = network.norm.weight + 1
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        fuzzing._same(network, folder)
