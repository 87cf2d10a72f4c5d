"""Random drafters in every format, written and loaded once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dflash_mlx.verifier.model import Target
from support.drafting import CASES, Drafting
from support.families import make_model


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """drafting(name of a format, settings): a drafter of a tiny llama."""
    target = Target(make_model("llama"), 512, "llama")

    @cache
    def get(name: str, **settings: Any) -> Drafting:
        kind, case = CASES[name]
        return kind(tmp_path_factory.mktemp("drafter"), *case, target, **settings)

    return get
