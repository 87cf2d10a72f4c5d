"""Repositories on the hub, checked by their heads: what is found is what is found of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError
from safetensors.numpy import save_file

from dflash_mlx import DFlashError
from dflash_mlx.core.config import PairConfig
from dflash_mlx.models.compatibility import HubRepository, check_target
from dflash_mlx.models.pair_report import check_named
from support.hub_server import Hub, serve
from support.models import write_drafter, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a target and a drafter, and an empty cache."""
    drafter = write_drafter(tmp_path / "drafter")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve({"owner/model": model, "owner/drafter": drafter}) as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


def test_a_repository_is_checked_by_its_heads_and_no_weight_is_fetched(model, hub):
    local = check_target(model)
    report = check_named(PairConfig("owner/model", "owner/drafter"))
    assert report.findings == ()
    assert report.target.weights == local.weights
    ranges = {r for _, file, r in hub.requests if file.endswith(".safetensors")}
    assert ranges == {"bytes=0-100000"}
    with pytest.raises(DFlashError, match="'owner/none' is neither a folder nor a public"):
        check_target(HubRepository("owner/none")).raise_first()


def test_without_a_network_that_is_what_is_said(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    (found,) = check_target(HubRepository("owner/model")).errors
    assert "owner/model is no local folder, and the hub cannot be reached" in found.what
    assert "network" in found.next_step


def head(text: bytes) -> Callable[[bytes], bytes]:
    return lambda sound: len(text).to_bytes(8, "little") + text + bytes(16)


ENTRY = b'{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
HEADS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another type": (lambda sound: sound.replace(b'"F32"', b'"F64"', 1), "is 'F64', not one of"),
    "truncated": (lambda sound: sound[:-1000], "it is truncated"),
    "longer": (lambda sound: sound + b"x", "it has bytes that are no tensor's"),
    "empty": (lambda sound: b"", "it has 0 bytes"),
    "short": (lambda sound: sound[:5], "it has 5 bytes"),
    "a list": (head(b"[]"), "its header is a JSON list"),
    "a number": (head(b'{"a": 1}'), "its tensor 'a' is 1"),
    "not UTF-8": (head(b'{"\xff": ' + ENTRY + b"}"), "its header is not UTF-8 at byte 2"),
    "a name twice": (head(b'{"a": ' + ENTRY + b', "a": ' + ENTRY + b"}"), "'a' twice"),
    "nested": (head(b"[" * 5000 + b"]" * 5000), "its header is not JSON"),
    "metadata": (head(b'{"__metadata__": {"b": 1}, "a": ' + ENTRY + b"}"), "expected a string"),
    "a large size": (lambda sound: (2**63).to_bytes(8, "little") + sound[8:], "should have"),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_damaged_head_on_the_hub_is_refused_as_one_here_is(case, model, hub):
    damage, sentence = HEADS[case]
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    (there,), (here,) = (
        check_target(source).errors for source in (HubRepository("owner/model"), model)
    )
    assert there.what == here.what.replace(str(model), "owner/model")
    assert sentence in there.what


def test_a_long_head_on_the_hub_takes_a_second_request_for_its_rest(model, hub):
    names = [f"{i:0100}" for i in range(1000)]
    save_file({name: np.zeros(1, np.float32) for name in names}, model / "model.safetensors")
    header = HubRepository("owner/model").header("model.safetensors", "")
    assert sorted(header) == names
    first, second = [r for _, file, r in hub.requests if r]
    assert (first, second[:14]) == ("bytes=0-100000", "bytes=100001-1")


def test_a_gated_repository_says_that_its_licence_has_to_be_accepted(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise GatedRepoError("403 Client Error", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(HfApi, "model_info", refuse)
    (found,) = check_target(HubRepository("owner/model")).errors
    assert str(found) == (
        "owner/model is open only to those who have accepted its licence; "
        "accept its licence on the hub and log in"
    )
