"""A fine-tune is offered the drafter of the model that its card says it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_mlx.core.config import DecodeConfig, PairConfig
from dflash_mlx.models import names
from dflash_mlx.models.library import on_this_machine
from dflash_mlx.models.load import check_named, load_pair
from dflash_mlx.models.names import base_models, find_names, inherited
from dflash_mlx.models.source import Source
from support.hub_server import Hub, serve
from support.models import write_drafter, write_model

PARENT, DRAFTER = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"
CARD = f"---\nlicense: mit\nbase_model: {PARENT}\n---\n# Tuned\nbase_model: other/model\n"


@pytest.mark.parametrize(
    ("front", "found"),
    [
        ("base_model: 'a/b' # the best", ["a/b"]),
        ('base_model:\n- a/b\n- "c/d"\ntags:\n- e/f', ["a/b", "c/d"]),
        ("base_model_relation: quantized\nbase_model: [a/b]", ["a/b"]),
        ("base_model: a/b\nbase_model_relation: inspired", []),
        ("base_model: 5\nnested:\n  base_model: a/b", []),
        ("base_model: [", []),
        ("- a/b", []),
        ("", []),
    ],
)
def test_a_card_says_what_a_model_was_made_from(front, found, tmp_path):
    card = tmp_path / "README.md"
    card.write_text(f"---\n{front}\n---\n# Title\n\nbase_model: x/y\n")
    assert base_models(card) == found
    card.write_text(f"---\n{front}\n")
    assert base_models(card) == [], "it never ends"
    card.write_bytes(b"---\nbase_model: \xff\n---\n")
    assert base_models(card) == []


# Folders


def tuned(folder: Path, card: str | None = CARD) -> Path:
    model = write_model(folder)
    if card is not None:
        (model / "README.md").write_text(card)
    return model


@pytest.mark.usefixtures("no_hub")
def test_a_folder_is_offered_its_parent_s_drafter_and_told_so(tmp_path):
    folder = str(tuned(tmp_path / "tuned"))
    names = inherited(find_names(PairConfig(folder)))
    assert (names.model, names.drafter, names.asks_first) == (folder, DRAFTER, False)
    assert dict(names.others)["eagle3"].startswith("AngelSlim/Qwen3-8B")
    assert dict(names.preset.template) == {"enable_thinking": False}
    assert all(part in names.lineage for part in (folder, PARENT, DRAFTER))
    listed = on_this_machine(Source.of(Path(folder)), [])
    assert listed.drafter == DRAFTER and not listed.entry.verified
    assert listed.config == PairConfig(folder)


@pytest.mark.usefixtures("no_hub")
def test_a_parent_may_be_named_with_its_quantisation_or_its_head(tmp_path):
    for i, parent in enumerate(("mlx-community/Qwen3-8B-4bit-dwq-v2", "owner/Qwen3-8B-oQ4e-mtp")):
        folder = str(tuned(tmp_path / str(i), CARD.replace(PARENT, parent)))
        assert inherited(find_names(PairConfig(folder))).drafter == DRAFTER


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("card", [None, "", "# Title", CARD.replace(PARENT, "owner/unknown")])
def test_a_folder_without_a_known_parent_stays_as_it_is_and_the_hub_is_not_asked(tmp_path, card):
    names = find_names(PairConfig(str(tuned(tmp_path / "tuned", card))))
    assert inherited(names) == names and names.drafter is None
    assert not load_pair(PairConfig(names.model)).drafters


@pytest.mark.usefixtures("no_hub")
def test_what_has_a_drafter_or_needs_none_is_left_alone_and_no_card_is_read(tmp_path, monkeypatch):
    folder, drafter = str(tuned(tmp_path / "Qwen3-4B-4bit")), write_drafter(tmp_path / "drafter")
    assert inherited(find_names(PairConfig(folder))).drafter == "z-lab/Qwen3-4B-DFlash-b16"
    folder = str(tuned(tmp_path / "tuned"))
    for config in (PairConfig(folder, str(drafter)), PairConfig(folder, "none"), PairConfig()):
        assert inherited(find_names(config)) == find_names(config)
    monkeypatch.setattr(names, "base_models", lambda card: pytest.fail("read"))
    assert load_pair(PairConfig(folder), DecodeConfig("ngram")).drafters == ()


# On the hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    card = CARD.replace(f" {PARENT}", f"\n- {PARENT}")
    models = {
        "owner/tuned": tuned(tmp_path / "tuned", card),
        DRAFTER: write_drafter(tmp_path / "d"),
    }
    with serve(models, tmp_path / "cache") as served:
        yield served


def test_a_model_of_the_hub_drafts_with_its_parent_s_drafter(hub):
    report = check_named(PairConfig("owner/tuned"))
    assert report.drafters[0].name == DRAFTER and not report.errors
    said = [finding.what for finding in report.findings]
    assert any(f"made from {PARENT}" in what and DRAFTER in what for what in said)
    pair = load_pair(PairConfig("owner/tuned"))
    assert (pair.drafter_name, len(pair.drafters)) == (DRAFTER, 1)
    (note,) = [note for note in pair.notes if "made from" in note]
    assert all(part in note for part in ("owner/tuned", PARENT, DRAFTER))


def test_the_hub_is_not_asked_for_the_card_of_a_model_that_is_here(hub, monkeypatch):
    load_pair(PairConfig("owner/tuned"), DecodeConfig("none"))
    monkeypatch.setattr("dflash_mlx.models.source.HfApi", lambda: pytest.fail("asked the hub"))
    assert inherited(find_names(PairConfig("owner/tuned"))).drafter == DRAFTER


def test_a_parent_s_drafter_that_cannot_be_had_is_done_without(hub, monkeypatch):
    del hub.repositories[DRAFTER]
    pair = load_pair(PairConfig("owner/tuned"))
    assert not pair.drafters and DRAFTER in pair.undrafted
    assert not any("made from" in note for note in pair.notes)
    hub.repositories.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pair = load_pair(PairConfig("owner/tuned"))
    assert not pair.drafters and pair.undrafted
