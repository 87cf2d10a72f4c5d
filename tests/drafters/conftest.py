"""Random drafters in every format, written and loaded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from dflash_mlx.verifier.model import Target
from support.drafter_formats import FORMATS, WINDOWS, Drafting
from support.families import make_model


@pytest.fixture(scope="session")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Drafting]:
    target, formats = Target(make_model("llama"), 512, "llama"), {**FORMATS, **WINDOWS}

    @cache
    def get(name: str) -> Drafting:
        return Drafting(tmp_path_factory.mktemp("drafter"), *formats[name], target)

    return get
