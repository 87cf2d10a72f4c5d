"""Which drafter a target gets by its name alone, and that no other model gets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx import DFlashError, PairConfig, load
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.methods import METHODS, choices, format_of
from dflash_mlx.drafters.networks.files import read_json
from dflash_mlx.engine.pair import Capabilities, Preset
from dflash_mlx.models import names
from dflash_mlx.models.check import check_drafter
from dflash_mlx.models.load import load_pair
from dflash_mlx.models.names import (
    DEFAULT_MODEL,
    SHIPPED,
    Entry,
    Names,
    entries,
    find_names,
    instead_of,
    registered,
    same_weights,
)
from dflash_mlx.session.session import generate
from support.models import write_drafter, write_model

pytestmark = pytest.mark.usefixtures("no_network")
DRAFTER = "z-lab/Qwen3-4B-DFlash-b16"
MADE_FROM = {"target": "Qwen/Qwen3-4B", "drafter": DRAFTER}
UNTHINKING = Preset("auto", (("enable_thinking", False),))
RANKS = {"dflash": 0, "eagle3": 1, "specdiff": 1, "mtp": 2, "assistant": 2, "lm": 3, "": 4}
ENTRIES = entries()
TARGETS = [target for entry in ENTRIES for target in entry.targets]
OWNERS = ("", "mlx-community/", "lmstudio-community/", "unsloth/", "someone/", "/home/me/models/")
QUANTISATIONS = (
    "4bit", "8-bit", "6.5bit", "3bits", "MLX-4bit", "mlx-8bit", "bf16", "fp16", "float32", "FP8",
    "MXFP4", "MXFP4-Q8", "mxfp8", "nvfp4", "int4", "4bit-DWQ", "4bit-DWQ-05082025", "4bit-AWQ",
    "8bit-gs32", "OptiQ-4bit", "MLX", "oQ4", "oQ3.5e-fp16", "UD-MLX-4bit", "UD-Q4_K_XL-mlx",
    "UD-MXFP4_K_XL", "Q4_K_M", "qat", "qat-4bit", "qx86-hi-mlx", "JANG_4D", "qat-q4_0-unquantized",
    "4bit-dwq-v2", "4bit-DWQ-053125", "MLX-4bit-g128", "mlx-mixed_4_6", "qx86x-hi-mlx",
)  # fmt: skip
HEADS = (  # beside a target's own tensors, as people name such folders
    "MTP-4bit", "MLX-MTP-mxfp4", "oQ4e-mtp", "MTP", "MTPLX-4bit", "4bit-MTPLX",
    "MTPLX-Optimized-Speed", "MTP-NVFP4",
)  # fmt: skip
OTHERS = (
    "Instruct-2507", "Thinking-2507", "Base", "Instruct-2507-4bit", "VL", "Coder", "abliterated",
    "heretic-8bit", "distill-mlx-4bit", "MTPx", "2507", "chat-v2", "LoRA-fp16", "reasoning-4bit",
    "4b",
)  # fmt: skip


def spelled(draw: Any) -> tuple[str, str]:
    """A target of the registry, and another way to write it."""
    target = draw(st.sampled_from(TARGETS))
    name = target.split("/")[1]
    for suffix in draw(st.lists(st.sampled_from(QUANTISATIONS), max_size=2)):
        name += draw(st.sampled_from("-_")) + suffix
    case = draw(st.sampled_from([str, str.lower, str.upper]))
    return target, draw(st.sampled_from(OWNERS)) + case(name)


def test_every_pair_is_complete_and_named_once():
    names = [target.split("/")[1].lower() for target in TARGETS]
    assert len(set(names)) == len(names) > 15
    for entry in ENTRIES:
        assert all(target.count("/") == 1 for target in entry.targets)
        assert entry.method in choices()
        for drafter in (entry.drafter, entry.second_drafter or entry.drafter):
            assert drafter.count("/") == 1 or FILES.read_drafter(SHIPPED / drafter).config
        further = [*dict(entry.others).values(), *entry.alternatives, *dict(entry.pickled)]
        assert len({entry.drafter, *further}) == 1 + len(further)
        families = list(dict(entry.others))
        assert families == sorted(families, key=RANKS.__getitem__), "a worse one stands in"
        shipped = [drafter for drafter in further if "/" not in drafter]
        assert all(format_of(read_json(SHIPPED / drafter)) for drafter in shipped)
        assert set(dict(entry.pickled).values()) <= {entry.drafter, *further}
        assert entry.verified == ("/" not in entry.drafter), "only files in the package were tried"


def test_auto_prefers_loaded_families_in_the_order_of_the_registry():
    """Of equal ones the first in the table."""
    found = sorted(METHODS.values(), key=lambda method: -method.preference)
    ranks = [RANKS[method.family] for method in found if method.preference]
    assert ranks == sorted(ranks) and len(ranks) > 5


def test_drafters_of_further_families_and_others_are_known_for_a_target():
    others = dict(find_names(PairConfig("mlx-community/Qwen3-8B-4bit")).others)
    assert others["eagle3"] == "AngelSlim/Qwen3-8B_eagle3" and "diffusion" in others["specdiff"]
    more = registered("Qwen3-8B").more
    assert "AngelSlim/Qwen3-8B_eagle3 (eagle3)" in more
    assert "deepseek-ai/dspark_qwen3_8b_block7" in more
    assert registered("Qwen/Qwen3.5-0.8B").more == ""


@pytest.mark.parametrize("place", ["yuhuili--EAGLE3-LLaMA3.1-Instruct-8B", "my-drafter"])
def test_the_refusal_of_a_pickled_drafter_names_another_of_the_same_target(tmp_path, place):
    folder = write_drafter(tmp_path / f"models--{place}" / "snapshots" / "0")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (finding,) = check_drafter(folder).errors
    assert "pytorch_model.bin" in finding.what
    named = "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3" in finding.next_step
    assert named == (place != "my-drafter") and ".safetensors" in finding.next_step
    assert instead_of("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B").startswith("RedHatAI/Llama-3.3-70B")
    assert instead_of("owner/unknown") is None


@given(st.data())
def test_a_target_is_found_under_every_owner_and_quantisation_but_no_model_named_after_it(data):
    target, name = data.draw(st.composite(spelled)())
    found = registered(name)
    assert found is not None and target in found.targets
    other = registered(f"{name}-{data.draw(st.sampled_from(OTHERS))}")
    assert other is None or target not in other.targets
    before = data.draw(st.sampled_from(["my-", "Deep", "x"]))
    assert registered(before + name.split("/")[-1]) is None


@given(st.sampled_from(TARGETS), st.sampled_from(HEADS), st.sampled_from(OWNERS))
def test_a_target_whose_folder_has_its_head_too_is_that_target_and_no_quantisation_of_it(
    target, head, owner
):
    name = f"{owner}{target.split('/')[1]}-{head}"
    found = registered(name)
    assert found is not None and target in found.targets
    assert not same_weights(name, target), "offered as a target, while it may be a head alone"
    assert registered(f"{name}-tuned") is None


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("/c/hub/models--mlx-community--Qwen3-8B-4bit/snapshots/0ab1", "Qwen/Qwen3-8B"),
        ("./Qwen3-4B-4bit/", "Qwen/Qwen3-4B"),
        ("C:\\models\\qwen3.5-9b-mlx-4bit", "Qwen/Qwen3.5-9B"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-8bit", "meta-llama/Llama-3.1-8B-Instruct"),
        (DEFAULT_MODEL, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Qwen/Qwen3-4B-Thinking-2507", None),
        ("mlx-community/Qwen3-4B-Instruct-2507-4bit", "Qwen/Qwen3-4B-Instruct-2507"),
        ("Jundot/Qwen3.8-27B-oQ4e-mtp", "Qwen/Qwen3.8-27B"),
        ("./models/Qwen3.6-35B-A3B-VL-MTP-mxfp8", None),
        ("Qwen/Qwen3-16B", None),
        ("Qwen3-4B/other", None),
        ("", None),
        ("/", None),
    ],
)
def test_names_that_are_folders_or_close_to_a_target(name, target):
    found = registered(name)
    assert (found and found.name) == target


# From names to parts


def test_what_is_asked_for_by_name_goes_before_the_registry():
    default = find_names(PairConfig())
    assert (default.model, default.shown, default.preset.method) == (None, DEFAULT_MODEL, "ddtree")
    assert default.drafter == "smollm2-135m-dflash" and default.second_drafter
    assert find_names(PairConfig(second_drafter="none")).second_drafter is None
    known = find_names(PairConfig("Qwen/Qwen3-4B"))
    assert (known.drafter, known.asks_first) == ("z-lab/Qwen3-4B-DFlash-b16", False)
    own = find_names(PairConfig("Qwen/Qwen3-4B", "own/drafter"))
    assert (own.drafter, own.asks_first, own.asks_second) == ("own/drafter", True, False)
    second = find_names(PairConfig("Qwen/Qwen3-4B", second_drafter="own/second"))
    assert (second.drafter, second.second_drafter) == (known.drafter, "own/second")
    assert (second.asks_first, second.asks_second) == (False, True)
    assert second.preset.method == "d2sd"
    assert find_names(PairConfig("owner/unknown")) == Names("owner/unknown", "owner/unknown")
    with pytest.raises(DFlashError, match="a second drafter needs a first one"):
        find_names(PairConfig("owner/unknown", second_drafter="own/second"))


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        (("mlx-community/Qwen3-4B-4bit",), UNTHINKING),
        (("mlx-community/Qwen3-4B-4bit", DRAFTER), UNTHINKING),
        (("mlx-community/Qwen3-4B-4bit", "own/drafter"), Preset()),
        (("owner/unknown", DRAFTER), Preset()),
        ((None, "own/drafter"), Preset()),
    ],
)
def test_advice_is_of_a_target_with_the_drafter_that_it_was_measured_with(names, preset):
    assert find_names(PairConfig(*names)).preset == preset


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with what is put into it: folders, or errors to raise."""
    shelf: dict[str, Any] = {"Qwen/Qwen3-4B": write_model(tmp_path / "target")}

    def snapshot_download(name: str, **_: Any) -> str:
        found = shelf.get(name, FileNotFoundError(f"asked for {name}"))
        if isinstance(found, Exception):
            raise found
        return str(found)

    monkeypatch.setattr("dflash_mlx.models.source.snapshot_download", snapshot_download)
    return shelf


def test_a_model_alone_gets_the_drafter_of_the_registry(hub, tmp_path):
    hub[DRAFTER] = write_drafter(tmp_path / "drafter")
    pair = load("Qwen/Qwen3-4B")
    assert (pair.target.name, pair.drafter_name) == ("Qwen/Qwen3-4B", DRAFTER)
    assert pair.capabilities == Capabilities(("dflash",), True, UNTHINKING)
    assert pair.template == {"enable_thinking": False} and "thinking=false" in pair.notes[-1]
    assert pair.fallback == ""


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        (FileNotFoundError("no network"), "cannot be reached (no network)"),
        ({"hidden_size": 128}, "hidden_size 128"),
        ({"architectures": ["Other"]}, "Other"),
    ],
    ids=["offline", "of another target", "of another kind"],
)
def test_a_drafter_is_done_without_unless_it_was_asked_for(hub, tmp_path, drafter, reason):
    if isinstance(drafter, dict):
        drafter = write_drafter(tmp_path / "drafter", **drafter)
    hub[DRAFTER] = drafter
    for uses in ((), (DecodeConfig(),), (DecodeConfig("none"), DecodeConfig())):
        pair = load_pair(PairConfig("Qwen/Qwen3-4B"), *uses)
        assert not pair.drafters
        assert reason in pair.undrafted and DRAFTER in pair.undrafted
        assert pair.fallback.endswith("so drafts come from prompt lookup")
    answer = generate(pair, "hello", DecodeConfig(max_tokens=5))
    assert answer.statistics.method == "ngram"
    with pytest.raises(DFlashError, match=r"z-lab/Qwen3-4B-DFlash-b16.*drafter="):
        generate(pair, "hello", DecodeConfig("ddtree"))
    for config, use in (
        (PairConfig("Qwen/Qwen3-4B"), DecodeConfig("dflash")),
        (PairConfig("Qwen/Qwen3-4B", DRAFTER), DecodeConfig()),
    ):
        with pytest.raises(DFlashError):
            load_pair(config, use)


def test_a_known_drafter_on_the_disk_stands_in_for_one_that_cannot_be_had(
    hub, tmp_path, monkeypatch
):
    misfit = str(write_drafter(tmp_path / "misfit", hidden_size=128))
    there = str(write_drafter(tmp_path / "there"))
    hub["owner/away"] = write_drafter(tmp_path / "away")  # to be downloaded
    others = ("eagle3", "owner/away"), ("mtp", misfit), ("lm", there)
    monkeypatch.setattr(
        names, "entries", lambda: (Entry(("Qwen/Qwen3-4B",), DRAFTER, None, others),)
    )
    monkeypatch.setattr(names, "whole_copy", lambda name, option: None)
    for uses in ((), (DecodeConfig(),)):
        pair = load_pair(PairConfig("Qwen/Qwen3-4B"), *uses)
        assert (pair.drafter_name, len(pair.drafters), pair.undrafted) == (there, 1, "")
        (note,) = pair.notes
        assert DRAFTER in note and f"so {there} drafts" in note
    for config, *uses in (
        (PairConfig("Qwen/Qwen3-4B"), DecodeConfig("ngram")),
        (PairConfig("Qwen/Qwen3-4B", "none"),),
    ):
        assert not load_pair(config, *uses).drafters
    with pytest.raises(DFlashError, match=DRAFTER):
        load_pair(PairConfig("Qwen/Qwen3-4B"), DecodeConfig("dflash"))
    (tmp_path / "there" / "config.json").unlink()
    assert DRAFTER in load_pair(PairConfig("Qwen/Qwen3-4B")).undrafted, "the one that was wanted"


SECONDS = (None, {"hidden_size": 128})  # missing, and of another target


@pytest.mark.parametrize("second", SECONDS)
def test_only_the_second_drafter_is_left_out(hub, tmp_path, monkeypatch, second):
    entry = Entry(("Qwen/Qwen3-4B",), DRAFTER, "z-lab/second")
    monkeypatch.setattr(names, "entries", lambda: (entry,))
    hub[DRAFTER] = write_drafter(tmp_path / "drafter")
    if second:
        hub["z-lab/second"] = write_drafter(tmp_path / "second", **second)
    for uses in ((), (DecodeConfig(),)):
        pair = load_pair(PairConfig("Qwen/Qwen3-4B"), *uses)
        assert (pair.drafter_name, len(pair.drafters), pair.undrafted) == (DRAFTER, 1, "")
        (note,) = pair.notes
        assert "the second drafter z-lab/second cannot be used" in note and "alone" in note
    with pytest.raises(DFlashError):
        load_pair(PairConfig("Qwen/Qwen3-4B"), DecodeConfig("d2sd"))


@pytest.mark.parametrize("second", SECONDS)
def test_a_second_drafter_that_was_asked_for_is_not_done_without(hub, tmp_path, second):
    asked = PairConfig("Qwen/Qwen3-4B", second_drafter="own/second")
    with pytest.raises(DFlashError, match=DRAFTER):  # nor is the first one, which it needs
        load_pair(asked, DecodeConfig())
    hub[DRAFTER] = write_drafter(tmp_path / "drafter")
    if second:
        hub["own/second"] = write_drafter(tmp_path / "second", **second)
    for uses in ((), (DecodeConfig(),)):
        with pytest.raises(DFlashError, match="own/second"):
            load_pair(asked, *uses)
    with pytest.raises(DFlashError, match="there is no folder '/nowhere/second'"):
        load_pair(replace(asked, second_drafter="/nowhere/second"), DecodeConfig())


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_no_drafter_is_fetched_for_methods_that_need_none(hub, method):
    hub[DRAFTER] = AssertionError("fetched")
    pair = load_pair(PairConfig("Qwen/Qwen3-4B"), DecodeConfig(method))
    assert pair.drafters == ()
    assert generate(pair, "hello", DecodeConfig(method, max_tokens=3)).statistics.method == method
    with pytest.raises(DFlashError, match=r"no drafter was loaded.*drafter="):
        generate(pair, "hello", DecodeConfig("dflash"))
