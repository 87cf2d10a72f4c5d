"""What the references are given and how they are compared; the packages are not installed here."""

from __future__ import annotations

from typing import Any

import compare_formats
import numpy as np
import pytest
from reference_case import Case, check_path
from reference_formats import compared


@pytest.fixture
def cases(tmp_path, monkeypatch) -> dict[str, Case]:
    few = ("domino", "version 2, padded vocabulary", "eagle3, raw", "eagle3, parallel, raw")
    found = {name: compare_formats.CASES[name] for name in few}
    monkeypatch.setattr(compare_formats, "CASES", found)
    monkeypatch.setattr(compare_formats, "WINDOWS", {})
    return {name: Case(told) for name, told in compare_formats.write(tmp_path).items()}


def test_a_reference_gets_the_block_the_path_and_our_logits_of_the_tokens_that_we_know(cases):
    domino, selector, eagle, parallel = cases.values()
    assert domino.block == [7, 5, 5, 5, 5] and not domino.first and len(domino.path) == 5
    assert selector.block == [7, *[5] * 5] and selector.first and len(selector.path) == 5
    assert [len(case.arrays["logits"]) for case in cases.values()] == [5, 5, 5, 7]
    assert eagle.arrays["logits"].shape[1] == len(eagle.arrays["ids"]) == 40
    assert len(parallel.path) == 6 and parallel.before[0] == 7


def test_a_difference_an_error_and_a_missing_module_are_told_apart(cases):
    case = cases["eagle3, raw"]
    ours, whole = case.arrays["logits"], np.zeros((5, 97))
    whole[:, case.arrays["ids"]] = ours
    other = ours + 0.5 * np.abs(ours).max() * (np.arange(ours.size) == 3).reshape(ours.shape)

    def fails(case: Case) -> Any:
        raise RuntimeError("no such layer")

    readers = (lambda _: ours, lambda _: whole, lambda _: None, fails)
    said = [compared(case, read) for read in readers]
    assert said == ["0.0e+00", "0.0e+00", "", "RuntimeError: no such layer"]
    assert float(compared(case, lambda _: other)) > 0.1


def test_another_path_is_an_error_where_the_package_knows_all_that_decides_it(cases):
    check_path(cases["domino"], cases["domino"].path)
    with pytest.raises(ValueError, match="another path"):
        check_path(cases["domino"], [1])
    check_path(cases["version 2, padded vocabulary"], [1])
