"""Damaged configurations, headers and tokenizers end in a sentence or in a right model.

The cases of one seed; `scripts/fuzz.py` runs all 10,000 of it, or others.
"""

from __future__ import annotations

import json
from random import Random

import pytest

from fuzz_driver import GOOD, outcomes
from mutations import mutate_bytes, mutate_json, mutate_safetensors

CASES = 1500
SEED = 20261121
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
SOUND = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def test_every_damaged_folder_is_refused_in_a_sentence_or_loads_as_it_is():
    found = list(outcomes(SEED, 0, CASES))
    assert [case for case in found if case["outcome"] not in GOOD] == []
    assert len(found) == CASES
    assert {case["outcome"] for case in found} == set(GOOD)
    assert len({case["subject"] for case in found}) == 12


@pytest.mark.parametrize("mutate", [mutate_safetensors, mutate_bytes])
def test_damages_are_many_and_come_again_with_their_seed(mutate):
    made = [mutate(SOUND, Random(i)) for i in range(200)]
    assert made == [mutate(SOUND, Random(i)) for i in range(200)]
    assert len(set(made)) > 100


def test_a_document_is_not_changed_by_damaging_a_copy_of_it():
    document = json.loads(HEADER)
    made = {mutate_json(document, Random(i)) for i in range(200)}
    assert len(made) > 100
    assert json.dumps(document).encode() == HEADER
