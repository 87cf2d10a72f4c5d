"""mx.compile is off in this room: on a CPU it first builds every family's functions in C++."""

import mlx.core as mx
import pytest


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    mx.disable_compile()
    yield
    mx.enable_compile()
