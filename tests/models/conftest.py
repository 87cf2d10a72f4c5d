"""What tests of models share: folders, and a hub that nobody may ask."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from support.models import write_drafter, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "drafter")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, its drafter and one of a wider target, which nobody changes."""
    root = tmp_path_factory.mktemp("models")
    return {
        "model": str(write_model(root / "model")),
        "drafter": str(write_drafter(root / "drafter")),
        "wide": str(write_drafter(root / "wide", hidden_size=128)),
    }


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the real hub; what is downloaded is what a test puts in its place."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the hub fails."""

    def asked(*_: Any, **__: Any) -> None:
        pytest.fail("asked the hub")

    for name in ("HfApi", "hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(f"dflash_mlx.models.source.{name}", asked)
