"""A wheel whose draft models are damaged."""

from __future__ import annotations

import shutil

import pytest
from huggingface_hub import constants

from dflash_chat import main as chat
from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.models import names
from dflash_mlx.models.load import check_named, load_pair
from dflash_mlx.session.session import generate
from support.models import write_endless_model

SHIPPED = sorted(file.parent for file in names.SHIPPED.glob("*/config.json"))


def truncated(folder):
    """As a disk that was full leaves it."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def overwritten(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 4096)


DAMAGES = {
    "truncated": truncated,
    "overwritten": overwritten,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "another config": lambda folder: (folder / "config.json").write_text("{}"),
    "nothing at all": shutil.rmtree,
}


@pytest.fixture(params=DAMAGES, scope="module")
def damaged(request, tmp_path_factory):
    """What is shipped, every draft model damaged; no hub is at hand."""
    place = tmp_path_factory.mktemp("data")
    for folder in SHIPPED:
        shutil.copytree(folder, place / folder.name)
        DAMAGES[request.param](place / folder.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "SHIPPED", place)
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        patch.setattr(constants, "HF_HUB_CACHE", str(place / "hub"))
        yield


def test_another_model_works_with_a_damaged_wheel(damaged, tmp_path, capsys):
    model = write_endless_model(tmp_path / "endless")
    chat.run(["--model", str(model), "--prompt", "hello", "--max-tokens", "4"])
    assert capsys.readouterr().out.strip()


def test_a_damaged_draft_model_that_was_asked_for_is_named_with_what_to_do(damaged, tmp_path):
    model = str(write_endless_model(tmp_path / "endless"))
    with pytest.raises(DFlashError, match=SHIPPED[0].name) as refused:
        load_pair(PairConfig(model, SHIPPED[0].name))
    assert refused.value.next_step and "\n" not in str(refused.value)


@pytest.mark.real
def test_the_default_model_answers_without_its_draft_models_and_says_why(damaged):
    report = check_named(PairConfig())
    told = [each.what for each in report.findings if SHIPPED[0].name in each.what]
    assert not report.errors and any("prompt lookup" in each for each in told), report.findings
    pair = load_pair(PairConfig())
    assert not pair.drafters
    assert generate(pair, "What is 2 + 3?", DecodeConfig(max_tokens=4)).tokens
