"""Targets of other publishers answer with the heads that are in their own folders."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import DecodeConfig, SamplingConfig
from dflash_mlx.convert.__main__ import main as convert
from dflash_mlx.core.config import PairConfig
from dflash_mlx.models.load import load_pair
from dflash_mlx.session.session import generate
from support.drafter_formats import loaded
from support.drafting import TOLERANCE, PublishedHeads
from support.families import make_model
from support.models import write_model
from support.published_heads import FORMATS, HEADS
from support.published_layouts import in_eight_bits, write_eight_bits

pytestmark = pytest.mark.usefixtures("no_network", "no_hub", "interpreted")
WAYS = {
    "a chain": {"block_size": 4},
    "a tree": {"budget": 6},
    "what pays": {},
    "a drawn chain": {
        "block_size": 4,
        "sampling": SamplingConfig(temperature=0.7, seed=3),
        "acceptance": "match",
    },
}


def with_head(folder: Path, name: str) -> Path:
    """A tiny target in whose folder a head lies in a file of its own."""
    raw = HEADS[name].raw
    write_model(folder, make_model("llama", **raw), **raw)
    tensors = {n: mx.array(a) for n, a in HEADS[name].tensors.items()}
    # mlx-lm knows DeepSeek's head by its layer, the 61st, and takes one of this size for a layer
    own = "head.safetensors" if raw["model_type"] == "deepseek_v3" else "model-head.safetensors"
    mx.save_safetensors(str(folder / own), tensors)
    return folder


@pytest.mark.parametrize("name", HEADS)
def test_answers_with_a_head_are_those_of_the_target_alone(tmp_path, name):
    folder = str(with_head(tmp_path, name))
    pair = load_pair(PairConfig(folder, folder))
    for how, settings in WAYS.items():
        if name == "mimo" and "block_size" in settings:
            settings = {**settings, "block_size": 2}
        plain = generate(pair, "hello", config("none", settings))
        answer = generate(pair, "hello", config("mtp", settings))
        assert answer.tokens == plain.tokens, how
        assert answer.statistics.drafted.total() > 0, how


def config(method: str, settings: dict) -> DecodeConfig:
    """Of an answer; plain decoding has no use for most of them."""
    used = settings if method == "mtp" else {k: v for k, v in settings.items() if k == "sampling"}
    return DecodeConfig(method, max_tokens=24, **used)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_taken_out_drafts_as_it_did_inside(tmp_path, name):
    inside, outside = with_head(tmp_path / "inside", name), tmp_path / "outside"
    convert([str(inside), str(outside), "--mtp"])
    subject = PublishedHeads(tmp_path / "head", *FORMATS[name])
    subject.model = loaded(outside, subject.target)
    text = subject.text(9)
    assert subject.error(subject.context(text), text, 7, 3) < TOLERANCE
    assert subject.model.block_size == (2 if name == "mimo" else 8)


@pytest.mark.parametrize("name", ["glm", "deepseek", "mimo", "exaone"])
def test_a_head_that_is_taken_out_can_be_packed(tmp_path, name):
    inside, outside = with_head(tmp_path / "inside", name), tmp_path / "outside"
    convert([str(inside), str(outside), "--mtp", "--bits", "8", "--group-size", "32"])
    subject = PublishedHeads(tmp_path / "head", *FORMATS[name])
    subject.model = loaded(outside, subject.target)
    assert subject.model.config.quantization.bits == 8
    text = subject.text(9)
    assert TOLERANCE < subject.error(subject.context(text), text, 7, 1) < 0.1


@pytest.mark.parametrize("name", ["glm lite", "mimo", "nemotron"])
def test_a_head_in_the_target_s_folder_is_found_without_being_named(tmp_path, name):
    pair = load_pair(PairConfig(str(with_head(tmp_path, name))))
    assert pair.capabilities.families == ("mtp",)


def test_a_head_of_eight_bit_floats_is_taken_out_unpacked(tmp_path):
    raw = {**HEADS["deepseek"].raw, "quantization_config": {"quant_method": "fp8"}}
    stored, meant = in_eight_bits(HEADS["deepseek"])
    write_eight_bits(tmp_path / "inside", raw, stored)
    convert([str(tmp_path / "inside"), str(tmp_path / "outside"), "--mtp"])
    subject = PublishedHeads(tmp_path / "head", raw, meant)
    subject.model = loaded(tmp_path / "outside", subject.target)
    text = subject.text(9)
    assert subject.error(subject.context(text), text, 7, 3) < TOLERANCE


def test_a_target_whose_head_was_left_out_says_where_to_get_it(tmp_path):
    raw = HEADS["glm"].raw
    folder = write_model(tmp_path, make_model("llama", **raw), **raw)
    assert "dflash_mlx.convert OWNER/NAME DST --mtp" in load_pair(PairConfig(str(folder))).undrafted
