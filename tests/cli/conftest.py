"""Command lines in this process, on tiny pairs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id

from dflash_mlx.cli import generate
from dflash_mlx.cli import options as cli
from support.models import TEMPLATE, write_drafter, write_model

# As many published templates do, this one has no place for a system prompt.
STRICT_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return json.loads(self.out)


Command = Callable[..., Result]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("cli")
    small = {"max_position_embeddings": 160}
    return {
        "model": str(write_model(root / "model", **small)),
        "drafter": str(write_drafter(root / "drafter")),
        "strict": str(write_model(root / "strict", template=STRICT_TEMPLATE, **small)),
        "bare": str(write_model(root / "bare", template=None, **small)),
        "wide": str(write_drafter(root / "wide", hidden_size=128)),
    }


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def refuse(name: str, **_: Any) -> str:
        validate_repo_id(name)  # the hub's own check, which needs no network
        raise FileNotFoundError(f"no network, asked for {name}")

    monkeypatch.setattr("dflash_mlx.models.source.snapshot_download", refuse)

    def run(main: Callable[[Sequence[str]], None], *argv: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["program", *argv])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        with pytest.raises(SystemExit) as left:
            cli.run(main, "program")
        return Result(int(left.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def ask(command: Command, folders: dict[str, str]) -> Command:
    """Run dflash_mlx.generate on the tiny pair; later options win over these."""

    def run(*argv: str, stdin: bytes = b"") -> Result:
        drafter = [] if "none" in argv else ["--drafter", folders["drafter"]]
        pair = ["--model", folders["model"], *drafter]
        options = [*pair, "--method", "dflash", "--max-tokens", "24"]
        return command(generate.main, *options, *argv, stdin=stdin)

    return run
