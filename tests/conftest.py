"""Loads the fast BLAS before any test imports MLX, and keeps clocks out of what tests find."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from dflash_mlx.system import blas

blas.preload()
os.environ["XDG_CONFIG_HOME"] = str(Path(__file__) / "nothing")  # nobody's own defaults
os.environ.pop("COLORFGBG", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job, and in all
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands that tests start and end
settings.register_profile("suite", deadline=None)  # processes side by side may have to wait
settings.load_profile("suite")


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """mx.compile is off: on a CPU it first builds every family's functions in C++."""
    import mlx.core as mx

    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random target, for command lines that train."""
    from support.tiny_training import write_target  # imports MLX

    return write_target(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Any:
    """A `Place` for one run with that target."""
    from support.tiny_training import Place

    return Place(tmp_path, tiny_model)


@pytest.fixture(scope="session", autouse=True)
def as_stored() -> None:
    """No GPU packs a draft model by itself, whose numbers tests compare."""
    if files := sys.modules.get("dflash_mlx.drafters.networks.files"):
        files.ON_A_GPU = files.AS_STORED


@pytest.fixture(autouse=True)
def known_times(request: pytest.FixtureRequest) -> None:
    """No session times a machine, so nothing is written to the user's cache."""
    if "dflash_mlx.drafters.budget" in sys.modules:
        from dflash_mlx.verifier.pass_times import PassTimes

        times = PassTimes((1, 96), (1.0, 3.0))
        patch = request.getfixturevalue("monkeypatch")
        patch.setattr("dflash_mlx.drafters.budget.stored_times", lambda target: times)
    if "dflash_mlx.models.choice" in sys.modules:  # nor is a drafter chosen by what is in there
        patch = request.getfixturevalue("monkeypatch")
        nowhere = Path(__file__) / "speeds.json"  # a place below a file
        patch.setattr("dflash_mlx.models.choice.speeds_file", lambda *_: nowhere)
    if "dflash_mlx.models.library" in sys.modules:  # nor are the user's models listed
        request.getfixturevalue("monkeypatch").setattr("dflash_mlx.models.library._LM_STUDIO", ())
