"""Heads in a target's own folder: found, drafted with, and taken out; a tiny Qwen3.5 has one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import constants

from dflash_mlx import DFlashError, PairConfig, generate
from dflash_mlx.convert.__main__ import main
from dflash_mlx.core.config import DecodeConfig, SamplingConfig
from dflash_mlx.drafters.mtp.checkpoint import FILES
from dflash_mlx.drafters.networks.files import read_headers
from dflash_mlx.models.check import check_drafter, check_target
from dflash_mlx.models.choice import with_own_head
from dflash_mlx.models.downloads import needed, needed_by
from dflash_mlx.models.library import on_this_machine
from dflash_mlx.models.load import check_named, load_pair
from dflash_mlx.models.names import find_names, whole_copy
from dflash_mlx.models.source import Source
from dflash_mlx.verifier.model import Target
from support import mtp_targets
from support.configs import config_with
from support.decoding import state_with
from support.drafting import Heads
from support.families import make_model
from support.hub_server import serve, use_hub
from support.mtp_targets import HEAD_SHARD, TARGET_SHARD, write_split, write_target
from support.reference_mtp import FORMATS, inside


def answers(pair: Any, *uses: DecodeConfig, tokens: int = 24) -> list[tuple[int, ...]]:
    prompt = "hello, hello"
    return [generate(pair, prompt, replace(use, max_tokens=tokens)).tokens for use in uses]


USES = [
    DecodeConfig("none"),
    DecodeConfig("mtp", block_size=4),
    DecodeConfig("mtp"),
    config_with("mtp", budget=12, branches=3),
    DecodeConfig(),
]
WARM = SamplingConfig(temperature=0.8, seed=3)


@pytest.mark.parametrize("changes", [{}, {"num_experts": 4}], ids=["dense", "with experts"])
def test_a_target_with_a_head_drafts_with_it_and_answers_as_plain_decoding(tmp_path, changes):
    pair = load_pair(PairConfig(str(write_target(tmp_path, **changes))))
    assert [drafter.family for drafter in pair.drafters] == ["mtp"]
    assert pair.target.is_recurrent
    found = answers(pair, *USES)
    assert len(set(found)) == 1 and len(found[0]) == 24
    warm = answers(pair, *[replace(use, sampling=WARM) for use in USES])
    assert len(set(warm)) == 1 and warm[0] != found[0]


@pytest.mark.parametrize("place", ["its own folder", "a split one", "ours"])
def test_a_head_can_be_named_wherever_it_is(tmp_path, place):
    folder = write_target(tmp_path / "target")
    head = {"its own folder": folder, "a split one": write_split(tmp_path / "split")}
    given = head.get(place) or converted(folder, tmp_path / "ours")
    pair = load_pair(PairConfig(str(folder), str(given)))
    assert [drafter.family for drafter in pair.drafters] == ["mtp"]
    assert len(set(answers(pair, *USES[:3]))) == 1


def converted(folder: Any, to: Any, *options: str) -> Any:
    main([str(folder), str(to), "--mtp", *options])
    return to


@pytest.mark.parametrize("options", [(), ("--bits", "8"), ("--bits", "4", "--group-size", "32")])
def test_a_head_is_taken_out_and_drafts_nearly_what_it_did(tmp_path, options):
    folder = write_target(tmp_path / "target")
    given = converted(folder, tmp_path / "head", *options)
    bits = check_drafter(given).weights.quantisation
    assert bits.partition(" ")[0] == (options[1] if options else "")
    model = Target(make_model("qwen3_5"), 512, "tiny")
    text = Heads(tmp_path / "x", *FORMATS["qwen3_5"], model).text(9)
    found = []
    for place in (folder, given):
        config = check_drafter(place).config
        head = FILES.load(place, config, model, PairConfig())
        context = head.new_context()
        context.append(mx.array(text[0]), mx.array(text[1]))
        found.append(np.array(head.begin(state_with(context)).logits(mx.array([7]), [-1])))
    apart = np.abs(found[0] - found[1]).max()
    assert apart < {"": 1e-5, "8": 0.2, "4": 2}[bits.partition(" ")[0]]


def test_of_a_published_target_only_the_files_of_the_head_are_fetched(tmp_path):
    folder = write_target(tmp_path / "target")
    with serve({"owner/model": folder}, tmp_path / "cache") as hub:
        converted("owner/model", tmp_path / "head")
        fetched = {name for how, name, part in hub.requests if how == "GET" and part is None}
    assert {name for name in fetched if name.endswith(".safetensors")} == {HEAD_SHARD}
    assert not any("00001" in name for _, name, _ in hub.requests), "not even its head"
    assert check_drafter(tmp_path / "head").errors == ()


def test_a_model_with_a_head_of_its_own_may_draft_whole_for_a_larger_one(tmp_path):
    """As Qwen3.5-0.8B, published with a head, does for Qwen3.5-27B."""
    small = write_target(tmp_path / "small")
    large = str(write_target(tmp_path / "large", mtp={}, num_hidden_layers=5))
    config = PairConfig(large, "owner/small")
    with serve({"owner/small": small}, tmp_path / "cache") as hub:
        pair = load_pair(config)
        assert {HEAD_SHARD, TARGET_SHARD} <= {name for _, name, part in hub.requests if not part}
    assert [drafter.family for drafter in pair.drafters] == ["lm"]
    assert len(set(answers(pair, USES[0], DecodeConfig("lm"), DecodeConfig()))) == 1
    assert [each.family for each in load_pair(PairConfig(str(small), str(small))).drafters] == [
        "mtp"
    ]


def test_a_head_of_a_published_target_is_fetched_alone_and_is_there_without_a_network(tmp_path):
    headless = str(write_target(tmp_path / "quantised", mtp={}))
    config = PairConfig(headless, "owner/model")
    with serve({"owner/model": write_target(tmp_path / "target")}, tmp_path / "cache") as hub:
        for _ in range(2):
            assert [drafter.family for drafter in load_pair(config).drafters] == ["mtp"]
        assert not any("00001" in name for _, name, _ in hub.requests)
        assert hub.fetched().count(None) == 1, "once"
        with pytest.MonkeyPatch.context() as patch:
            use_hub(patch)
            assert [drafter.family for drafter in load_pair(config).drafters] == ["mtp"]


def test_a_target_on_the_hub_brings_its_head_with_it(tmp_path):
    folder = write_target(tmp_path / "target")
    with serve({"owner/model": folder}, tmp_path / "cache") as hub:
        report = check_named(PairConfig("owner/model"))
        assert [drafter.name for drafter in report.drafters] == ["owner/model"]
        assert report.errors == [] or report.errors == ()
        assert not hub.fetched().count(None), "no weight is read for that"
        pair = load_pair(PairConfig("owner/model"))
        assert hub.fetched().count(None) == 2
    assert [drafter.family for drafter in pair.drafters] == ["mtp"]


def test_a_shard_that_the_index_names_for_the_head_has_to_be_there(tmp_path):
    folder = write_target(tmp_path)
    (folder / HEAD_SHARD).unlink()
    for read in (lambda: check_drafter(folder).raise_first(), lambda: converted(folder, "x")):
        with pytest.raises(DFlashError, match=f"lacks {HEAD_SHARD}") as refused:
            read()
    assert "another one as SRC" in refused.value.next_step, "the converter's own words"


def test_of_a_target_that_lost_its_head_is_said_where_to_get_it(tmp_path):
    folder = write_target(tmp_path / "target", mtp={})
    assert check_target(folder).errors == ()
    with pytest.raises(DFlashError, match=r"which its files lack.*convert OWNER/NAME DST --mtp"):
        load_pair(PairConfig(str(folder)), DecodeConfig("mtp"))
    config = FILES.parse_config(mtp_targets.config(), "D")
    (found,) = FILES.check_tensors(read_headers(folder), config, "D")
    assert "D hold no head" in found.what and "convert OWNER/NAME DST --mtp" in found.next_step
    with pytest.raises(DFlashError, match=r"drafter .*its files lack.*convert OWNER.NAME DST"):
        load_pair(PairConfig(str(folder), str(folder)))
    with pytest.raises(DFlashError, match="holds no head for multi-token prediction"):
        converted(folder, tmp_path / "head")
    pair, report = load_pair(PairConfig(str(folder))), check_named(PairConfig(str(folder)))
    assert pair.drafters == () and pair.undrafted in [note.what for note in report.findings]


def test_a_damaged_head_is_refused_and_its_model_does_not_draft_whole_in_its_place(tmp_path):
    folder = write_target(tmp_path / "target")
    without = {name: a for name, a in inside(mtp_targets.head()).items() if "fc.weight" not in name}
    damaged = write_target(tmp_path / "damaged", mtp=without)
    assert load_pair(PairConfig(str(folder), str(folder))).drafters[0].family == "mtp"
    with pytest.raises(DFlashError, match=r"tensor fc\.weight in .*damaged is missing"):
        load_pair(PairConfig(str(folder), str(damaged)))
    unread = write_target(tmp_path / "unread", mtp_use_hidden_state_from_layer=1)
    with pytest.raises(DFlashError, match="mtp_use_hidden_state_from_layer is 1"):
        load_pair(PairConfig(str(folder), str(unread)))
    larger = str(write_target(tmp_path / "larger", mtp={}, num_hidden_layers=5))
    assert load_pair(PairConfig(larger, str(unread))).drafters[0].family == "lm"


def test_a_list_of_models_says_that_one_has_its_drafter_in_it(tmp_path):
    found = {
        name: on_this_machine(Source.of(write_target(tmp_path / name, **more), "model"), [])
        for name, more in (("with", {}), ("without", {"mtp": {}}))
    }
    assert (found["with"].drafter, found["with"].drafts) == ("", "own head")
    assert (found["without"].drafter, found["without"].drafts) == ("", "lookup")


def test_a_known_drafter_goes_before_the_head(tmp_path):
    """Which is there for whoever asks for it."""
    folder = write_target(tmp_path / "Qwen3-4B")
    named = check_named(PairConfig(str(folder)))
    assert [drafter.name for drafter in named.drafters] == [str(folder)], "it stands in"
    said = [finding.what for finding in named.findings]
    assert any("z-lab/Qwen3-4B-DFlash-b16 cannot be used" in what for what in said)
    assert not any("is not verified" in what for what in said), "it drafts nothing"
    weights = named.target.weights  # which the head is among
    assert named.memory(False) == weights.memory(False) > 0
    asked = find_names(PairConfig(str(folder), str(folder)))
    assert needed_by(asked) == needed(Source.of(folder)) > 0
    pair = load_pair(PairConfig(str(folder)), DecodeConfig("mtp"))
    assert [drafter.family for drafter in pair.drafters] == ["mtp"]


def test_a_head_in_the_target_s_folder_takes_the_place_of_one_that_is_known(tmp_path):
    """Which would be fetched and loaded beside it."""
    folder = write_target(tmp_path / "Qwen3.5-27B-MTP-4bit")
    names = find_names(PairConfig(str(folder)))
    assert dict(names.others)["mtp"] == "Qwen/Qwen3.5-27B"
    found = with_own_head(names, Source.of(folder)).others
    assert found == (("mtp", str(folder)), names.others[1])


def test_a_head_that_another_program_has_fetched_alone_is_found_without_a_network(tmp_path):
    """Which leaves no list of what its repository has."""
    folder, cache = write_target(tmp_path / "target"), tmp_path / "cache"
    snapshot = cache / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        for name in ("config.json", mtp_targets.INDEX, HEAD_SHARD):
            assert whole_copy("owner/model", "drafter") is None, name
            shutil.copyfile(folder / name, snapshot / name)
        assert whole_copy("owner/model", "drafter").part == (HEAD_SHARD,)
        assert whole_copy("owner/model") is None
