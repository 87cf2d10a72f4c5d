"""Settings of a pair that save memory: where they are given, what they do, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_chat.backend import Backend
from dflash_mlx import DecodeConfig, DFlashError, PairConfig, Session, generate
from dflash_mlx.cli import generate as generating
from dflash_mlx.convert.conversion import ConvertConfig
from dflash_mlx.core.config import StructureConfig
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.networks import files
from dflash_mlx.drafters.networks.files import ON_A_GPU, Quantization, quantization_of
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.system import cpu_math
from dflash_mlx.verifier.model import Target
from support.app_scripts import ScriptedBackend, drive
from support.drafter_formats import case, version_1
from support.drafting import Blocks, cut, difference, grow
from support.families import FAMILIES, make_model
from support.family_configs import sliding
from support.models import write_drafter, write_model

HEAD_DIM = 32
WINDOW = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny pair whose keys and values can be quantised."""
    root = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama", {**FAMILIES["llama"], "head_dim": HEAD_DIM})
        model = write_model(root / "model", make_model("llama"))
    drafter = write_drafter(root / "drafter", head_dim=HEAD_DIM, intermediate_size=128)
    return str(model), str(drafter)


def pair_of(folders: tuple[str, str], **settings: Any) -> Pair:
    return load_pair(PairConfig(*folders, **settings))


def stored_bytes(arrays: list[mx.array]) -> int:
    return sum(array.nbytes for array in arrays)


# What they do


@pytest.mark.parametrize(
    "settings",
    [{"kv_bits": 4}, {"drafter_bits": 8}, {"kv_bits": 8, "drafter_bits": 4, "draft_window": 9}],
    ids=str,
)
def test_answers_with_drafts_are_plain_decodings_under_every_setting(folders, settings):
    pair = pair_of(folders, **settings)
    plain = generate(pair, "hello", DecodeConfig(method="none", max_tokens=24))
    for method in ({"method": "dflash"}, {"method": "ddtree", "budget": 12}):
        drafted = generate(pair, "hello", DecodeConfig(**method, max_tokens=24))
        assert drafted.tokens == plain.tokens
    if "kv_bits" not in settings:
        usual = generate(pair_of(folders), "hello", DecodeConfig(method="none", max_tokens=24))
        assert plain.tokens == usual.tokens


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_for_keys_and_values_shrink_both_caches(folders, bits):
    sizes = {}
    for kv_bits in (None, bits):
        session = Session(pair_of(folders, kv_bits=kv_bits), DecodeConfig(max_tokens=8))
        list(session.stream(list(range(40))))
        state = session.state
        sizes[kv_bits] = stored_bytes(state.cache.arrays), stored_bytes(state.context.arrays)
    share = (bits + 2 * 32 / HEAD_DIM) / 32  # a scale and a bias for each head's row
    for small, large in zip(sizes[bits], sizes[None], strict=True):
        assert small / large == pytest.approx(share)


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_of_the_drafter_pack_its_matrices_and_nothing_of_the_target(folders, bits):
    pair, usual = pair_of(folders, drafter_bits=bits), pair_of(folders)
    kinds = {type(module) for _, module in pair.drafters[0].module.named_modules()}
    assert nn.QuantizedLinear in kinds and nn.Linear not in kinds
    assert pair.drafters[0].module.layers[0].mlp.up_proj.bits == bits
    packed, full = (
        stored_bytes([a for _, a in tree_flatten(p.drafters[0].module.parameters())])
        for p in (pair, usual)
    )
    assert packed < 0.5 * full
    assert not any(isinstance(m, nn.QuantizedLinear) for m in pair.target.model.modules())


def test_groups_are_as_large_as_all_the_drafters_matrices_allow(tmp_path):
    for width, group in ((128, 64), (96, 32)):
        folder = write_drafter(tmp_path / "drafter", intermediate_size=width)
        network = FILES.load_network(folder, FILES.read_drafter(folder).config, mx.float32, bits=4)
        assert quantization_of(network) == Quantization(group, 4)
    folder = write_drafter(tmp_path / "drafter", intermediate_size=80)
    expected = "down_proj has rows of 80 numbers, .* of 32 do not divide; leave out drafter_bits="
    with pytest.raises(DFlashError, match=expected):
        FILES.load_network(folder, FILES.read_drafter(folder).config, mx.float32, bits=8)


@pytest.fixture
def gpu(monkeypatch):
    """What is loaded is loaded as on a GPU."""
    monkeypatch.setattr(cpu_math, "applies", lambda: False)
    monkeypatch.setattr(files, "ON_A_GPU", ON_A_GPU)


def bits_of(drafter: Any) -> int | None:
    packed = quantization_of(drafter.module)
    return packed and packed.bits


@pytest.mark.parametrize(
    ("settings", "bits"),
    [({}, 8), ({"drafter_bits": 4}, 4), ({"drafter_bits": 16}, None), ({"adapted": True}, None)],
)
def test_on_a_gpu_draft_models_are_packed_in_8_bits_unless_something_else_is_asked(
    folders, gpu, settings, bits
):
    assert bits_of(pair_of(folders, **settings).drafters[0]) == bits


def test_what_is_not_asked_for_and_does_not_fit_is_left_out(folders, gpu, tmp_path):
    odd = write_drafter(tmp_path / "drafter", head_dim=HEAD_DIM, intermediate_size=80)
    assert bits_of(pair_of((folders[0], str(odd))).drafters[0]) is None


def test_without_a_gpu_draft_models_stay_as_they_are_stored(folders, monkeypatch):
    monkeypatch.setattr(cpu_math, "applies", lambda: True)
    monkeypatch.setattr(files, "ON_A_GPU", ON_A_GPU)
    assert bits_of(pair_of(folders).drafters[0]) is None


# The window


def limited(folder: Path, most: int | None, **changes: Any) -> Blocks:
    """A drafter whose windows are limited."""
    target = Target(make_model("llama"), 4000, "llama")
    return Blocks(folder, *case(version_1(**changes)), target, draft_window=most)


def test_a_window_bounds_the_memory_of_the_context(tmp_path):
    sizes = {}
    for most in (None, 16):
        subject, sizes[most] = limited(tmp_path, most), []
        context = subject.model.new_context()
        for _ in range(12):
            grow(context, subject.text(256))
            sizes[most].append(stored_bytes(context.arrays))
    assert sizes[None][-1] > 10 * sizes[None][0]
    assert max(sizes[16][2:]) == min(sizes[16][2:]) < 2 * sizes[16][0]


@pytest.mark.parametrize("changes", [{}, sliding("SF", 6)], ids=["equal", "mixed"])
@pytest.mark.parametrize("length", [9, 300])
def test_a_context_that_cannot_go_back_needs_only_a_window_again(tmp_path, changes, length):
    subject = limited(tmp_path, WINDOW, **changes)
    text = subject.text(700)
    context = subject.context(text, *[50] * 14)
    start = context.refill_from(length)
    assert start == max(0, length - WINDOW + 1)
    for stop in (start + 3, length):  # interrupted, and then begun again
        context.trim(start)
        assert context.length == start
        grow(context, cut(text, start, stop))
        subject.found(context, 7, 8)  # sees what there is
    assert context.refill_from(length) == length
    for end in (length, length + 100):
        grow(context, cut(text, context.length, end))
        fresh = subject.found(subject.context(cut(text, 0, end)), 7, 8)
        assert difference(subject.found(context, 7, 8), fresh) < 1e-4


def test_only_a_window_is_computed_again_for_another_answer_to_an_earlier_question(folders):
    pair = pair_of(folders, draft_window=16, draft_vocabulary=97)
    config = DecodeConfig(method="dflash", block_size=8, max_tokens=12, prefill_step=100)
    prompt, more = (np.random.default_rng(n).integers(97, size=n).tolist() for n in (60, 400))
    sessions, answers = [Session(pair, config), Session(pair, config)], []
    list(sessions[0].stream(prompt + more))
    for session, reused in zip(sessions, (59 - 15, 0), strict=True):
        *_, last = session.stream(prompt)
        assert last.statistics.reused_tokens == reused
        answers.append((session.state.tokens, last.statistics.rounds))
    assert answers[0] == answers[1]
    model = pair.drafters[0]
    ours, theirs = (model.logits(s.state.context, mx.array([7]), 8) for s in sessions)
    assert mx.abs(ours - theirs).max().item() < 1e-4


# Where they are given


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (PairConfig, {"drafter_bits": 3}, "drafter_bits is 3; choose one of 4, 8, 16"),
        (PairConfig, {"kv_bits": 16}, "kv_bits is 16; choose one of 4, 8"),
        (PairConfig, {"draft_window": 1}, "draft_window is 1; choose 2 or more"),
        (PairConfig, {"draft_vocabulary": 0}, "draft_vocabulary is 0; choose 1 or more"),
        (PairConfig, {"template": ("thinking",)}, "template is 'thinking'; choose KEY=VALUE"),
        (PairConfig, {"template": ("tokenize=false",)}, "is 'tokenize=false'; choose an argument"),
        (ConvertConfig, {"bits": 7}, "bits is 7; choose one of "),
        (StructureConfig, {"json_schema": {"type": "object"}}, "json_schema is"),
    ],
)
def test_the_settings_are_checked_when_made(kind, settings, words):
    with pytest.raises(DFlashError, match=words):
        kind(**settings)


def test_a_model_whose_heads_cannot_be_quantised_is_refused_when_it_is_loaded(tmp_path):
    with pytest.raises(DFlashError, match="16 numbers wide"):
        load_pair(PairConfig(str(write_model(tmp_path / "model")), kv_bits=8))


class Noting(ScriptedBackend):
    """A backend whose pairs were changed when they were loaded."""

    def load(self, config: PairConfig):
        for event in super().load(config):
            event.pair.notes = (NOTE,)
            yield event


NOTE = "it computes in float32"


def test_what_loading_changed_is_said_everywhere(folders, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(import_module("dflash_mlx.models.load"), "fit_target", lambda *_: (NOTE,))
    (event,) = Backend().load(PairConfig(*folders))
    assert event.pair.notes == (NOTE,)
    generating.main(["--prompt", "a", "--max-tokens", "2", "--model", folders[0]])
    assert f"{NOTE}\n" in capsys.readouterr().err

    async def steps(chat, app, backend):
        assert chat.notices == [f"{NOTE}."]
        app.pair_config = PairConfig(kv_bits=4, draft_window=64, kernels="off")
        given = replace(app.pair_config, model="owner/other", drafter="owner/drafter")
        app.load(PairConfig("owner/other", "owner/drafter"))
        await chat.until(lambda: app.pair.target.name == "owner/other")
        assert backend.loaded[-1] == given

    drive(steps, tmp_path, Noting())
