"""Drafters of all families learn; what new ones start from; which cannot be trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from dflash_mlx import DecodeConfig, DFlashError, PairConfig, Session
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.methods import make_drafter
from dflash_mlx.drafters.networks.files import quantize_network
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_pair
from dflash_mlx.train.acceptance import ANCHORS, hits_at, measure, measure_drafts
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.data import Text, Texts
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.paired import EagleTrainee, HeadTrainee
from dflash_mlx.train.specdiff import SpecDiffTrainee
from dflash_mlx.train.trainee import Trainee, mask_token, spread_aux_layers, take_layers
from dflash_mlx.verifier.model import Target
from support import masked_formats, reference_mtp
from support.drafter_formats import loaded
from support.families import FAMILIES, make_model
from support.masked_formats import ours as masked
from support.reference_dflash import write_drafter_folder
from support.reference_dflash2 import idle_tensors, random_tensors, tiny_config
from support.reference_eagle3 import FORMATS
from support.tiny_training import (
    CONTEXT,
    arrays_of,
    assert_decoding_accepts_what_was_measured,
    corpus_rows,
    drafter_config,
    eagle_of,
    greedy_rows,
    head_of,
    make_trainee,
    masked_of,
    read_trainee,
    sampled_row,
    seen_by,
    texts_of,
    tiny_target,
    trainer_of,
)

BLOCK = 8
KNOWN = greedy_rows(8, 30)


def greedy_texts(rows: Any) -> Texts:
    return Texts("greedy", [Text.by_itself(row, i) for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts_of(tmp_path_factory.mktemp("features"), KNOWN)


# Learning


def learn(trainee: Trainee, texts: Texts, **settings: Any) -> Trainee:
    list(trainer_of(trainee, texts, sequences=8, **settings).losses())
    return trainee


@pytest.fixture(scope="module")
def trained(texts: Texts) -> Trainee:
    """A DFlash drafter that knows eight answers."""
    return learn(make_trainee(), texts, steps=120, learning_rate=1e-2, warmup=10, anchors=16)


LEARNERS: dict[str, tuple[Callable[[], Trainee], dict[str, Any], float]] = {
    "eagle3": (
        lambda: eagle_of(6),
        {"steps": 60, "learning_rate": 1e-2, "warmup": 5, "anchors": 8, "short_share": 0.0},
        3,
    ),
    "mtp": (
        lambda: head_of(6),
        {"steps": 60, "learning_rate": 1e-2, "warmup": 5, "anchors": 8, "short_share": 0.0},
        3,
    ),
    "specdiff": (
        lambda: masked_of(masked()),
        {"steps": 90, "learning_rate": 8e-3, "warmup": 10, "anchors": 16, "seed": 3},
        3,
    ),
    "dflash": (make_trainee, {}, 6),
}


@pytest.mark.parametrize("method", LEARNERS)
def test_a_drafter_learns_answers_by_heart_and_decoding_accepts_what_was_measured(
    texts, trained, tmp_path, method
):
    make, settings, least = LEARNERS[method]
    known = greedy_texts(KNOWN) if method == "specdiff" else seen_by(make(), texts)
    assert measure(make(), known).sum(axis=-1).mean() < 0.5
    trainee = learn(make(), known, **settings) if settings else trained
    trainee.save(tmp_path)
    saved, target = read_trainee(tmp_path, tiny_target()), tiny_target()
    pair = Pair(target, None, (loaded(tmp_path, target),))
    drafter = make_drafter(pair, DecodeConfig(method, saved.config.block_size))
    assert_decoding_accepts_what_was_measured(saved, drafter, KNOWN, known, least)


@pytest.mark.parametrize("prefix", [0, 2, BLOCK - 2])
def test_a_measurement_is_of_anchors_evenly_spread_in_every_text(trained, tmp_path, prefix):
    rows = [*KNOWN[:3], *greedy_rows(12, 9, seed=1)[:6], sampled_row("s", KNOWN[4])]
    texts, expected = texts_of(tmp_path / "cache", rows), []  # more than one batch
    for i, text in enumerate(texts.texts):
        anchors = text.anchors[: max(1, len(text.anchors) - prefix)]
        spread = anchors[np.linspace(0, len(anchors) - 1, ANCHORS).round().astype(int)]
        found = hits_at(trained, texts, np.array([i]), spread[None], prefix)[0]
        differs = text.likely[:-1, 0] != text.tokens[1:]
        for anchor, hits in zip(spread, found, strict=True):
            wrong = np.flatnonzero(differs[anchor + prefix : anchor + BLOCK - 1])
            assert not wrong.size or not hits[wrong[0] + 1 :].any(), "the text went another way"
        expected += [*found]
    found = measure(trained, texts, prefix)
    assert 0 < np.mean(expected) < 1 and np.array_equal(found, expected)
    by_position, by_prefix = measure_drafts(trained, texts, True)
    assert by_prefix[prefix] == pytest.approx(np.sum(expected, axis=-1).mean())
    assert prefix or by_position == pytest.approx(np.mean(expected, axis=0))


# What they start from


def pair_of(target: Target) -> Pair:
    return Pair(target, SimpleNamespace(mask_token_id=7))


def test_a_new_eagle_is_the_targets_last_layer_behind_its_last_tap():
    target = Target(make_model("smollm3"), 512, "four layers")
    trainee = EagleTrainee.new(TrainConfig(mode="eagle3", steps=1), pair_of(target))
    assert trainee.config.aux_layers == (1,) and trainee.config.num_target_layers == 4
    layer, own = target.model.layers[-1], trainee.network.midlayer
    d = trainee.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = getattr(layer.self_attn, name).weight
        matrix = getattr(own.self_attn, name).weight
        assert mx.array_equal(matrix[:, d:], theirs)
        assert 0 < mx.abs(matrix[:, :d]).max() < 0.2
    assert mx.array_equal(own.self_attn.o_proj.weight, layer.self_attn.o_proj.weight)
    assert mx.array_equal(own.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert mx.array_equal(own.hidden_norm.weight, layer.input_layernorm.weight)
    assert mx.array_equal(own.input_layernorm.weight, mx.ones(d))
    assert mx.array_equal(trainee.network.norm.weight, target.model.model.norm.weight)
    assert mx.array_equal(trainee.network.fc.weight[:, -d:], mx.eye(d))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_new_head_is_the_targets_last_layer_behind_its_last_states(name):
    target = Target(make_model(name), 512, name)
    trainee = HeadTrainee.new(TrainConfig(mode="mtp", steps=1), pair_of(target))
    assert trainee.aux_layers == (target.num_layers - 1,)
    assert not (trainee.config.hidden_normed or trainee.config.feeds_normed)
    own = dict(tree_flatten(trainee.network.parameters()))
    theirs = dict(tree_flatten(target.model.layers[-1].parameters()))
    mine = {n.removeprefix("layers.0."): a for n, a in own.items() if "layers.0." in n}
    assert mine.keys() == theirs.keys(), "norms of heads and biases where it has them"
    assert all(mx.array_equal(mine[key], theirs[key]) for key in mine)
    assert mx.array_equal(own["norm.weight"], target.model.model.norm.weight)
    embedding, state = mx.split(own["fc.weight"], 2, axis=-1)
    assert mx.array_equal(state, mx.eye(len(state))) and 0 < mx.abs(embedding).max() < 0.2
    rows = target.model.model.embed_tokens(mx.arange(64)[None])
    for layer in target.model.layers:
        rows = layer(rows, "causal", None)
    sizes = np.sqrt(np.square(np.array(rows[0])).mean(axis=-1))
    assert np.allclose(own["pre_fc_norm_hidden.weight"], np.sort(sizes)[32], rtol=1e-5)


def test_taps_of_a_new_eagle_are_the_usual_ones_or_as_many_as_asked_for():
    def aux_layers(layers: int, **settings: Any) -> Any:
        target = Target(make_model("llama", layers=layers), 512, "it")
        config = TrainConfig(mode="eagle3", steps=1, start="random", **settings)
        return EagleTrainee.new(config, pair_of(target)).config.aux_layers

    assert [aux_layers(layers) for layers in (3, 5, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 3, 4)]
    assert aux_layers(8, taps=2) == (1, 5) and aux_layers(8, taps=4) == (1, 2, 4, 5)
    with pytest.raises(DFlashError, match="taps is 2; choose 1 to 1,"):
        aux_layers(4, taps=2)


@pytest.mark.parametrize(("name", "layers"), [("llama", 3), ("qwen2", 2), ("qwen3", 2)])
def test_a_new_masked_drafter_is_layers_of_the_target_from_the_first_to_the_last(name, layers):
    target = Target(make_model(name), CONTEXT, name)
    config = TrainConfig(mode="specdiff", steps=1, layers=layers, block_size=5)
    trainee = SpecDiffTrainee.new(config, pair_of(target))
    assert (trainee.config.mask_token_id, trainee.config.block_size) == (7, 5)
    own = dict(tree_flatten(trainee.network.parameters()))
    for i, place in enumerate([0, 1, 2] if layers == 3 else [0, 2]):
        theirs = dict(tree_flatten(target.model.layers[place].parameters()))
        mine = {n.removeprefix(f"layers.{i}."): a for n, a in own.items() if f"layers.{i}." in n}
        assert mine.keys() == theirs.keys(), "norms of heads and biases where it has them"
        assert all(mx.array_equal(mine[key], theirs[key]) for key in mine)
    assert mx.array_equal(own["norm.weight"], target.model.model.norm.weight)


MATRICES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MATRICES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]


def new_drafter(target: Target, **settings: Any) -> DFlashTrainee:
    """A new drafter of the target's widths: noise, unless settings say more."""
    config = TrainConfig(**{"steps": 1, "layers": 2, "start": "random", **settings})
    return DFlashTrainee.new(config, Pair(target, SimpleNamespace(mask_token_id=5)))


def test_taps_are_layers_of_the_target_in_order():
    def spread(layers: int, count: int) -> list[int]:
        return list(spread_aux_layers(SimpleNamespace(num_layers=layers), None, count))

    assert spread(30, 5) == [1, 8, 14, 20, 27], "as published drafters have them"
    for layers, count in product(range(1, 40), range(1, 9)):
        aux_layers = spread(layers, count)
        assert 1 <= len(aux_layers) <= count and set(aux_layers) <= set(range(layers))
        assert aux_layers == sorted(set(aux_layers))
        if layers >= count + 3 and count > 1:
            assert (len(aux_layers), aux_layers[0], aux_layers[-1]) == (count, 1, layers - 3)


def words(special: list[int], template: list[int] | None, mask: int | None) -> Any:
    """A tokenizer whose conversations are `template`, and 7 where an assistant speaks."""

    def apply(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
        roles = [message["role"] for message in messages]
        spoken = add_generation_prompt or "assistant" in roles
        return [*(template or []), *([7] if spoken else [])]

    return SimpleNamespace(
        **{"all_special_ids": special, "mask_token_id": mask, "eos_token_ids": {2, 3}},
        **{"bos_token_id": 1, "pad_token_id": None},
        has_chat_template=template is not None,
        apply_chat_template=apply,
    )


def test_the_mask_is_a_token_that_no_conversation_contains():
    assert mask_token(words([1, 2, 3, 9], [5], 4)) == 4, "its own"
    assert mask_token(words([0, 1, 2, 3], [5], 0)) == 0, "token 0"
    assert mask_token(words([1, 2, 3, 5, 8, 9], [5], None)) == 9, "a spare one"
    assert mask_token(words([1, 2, 3, 6, 7], [5], None)) == 6, "no role's"
    assert mask_token(words([1, 2, 3, 6], None, None)) == 6, "no template"
    with pytest.raises(DFlashError, match="mask; .*--init"):
        mask_token(words([1, 2, 3, 5, 7], [5], None))


@pytest.mark.parametrize("name", ["llama3_rope", "qwen3"])
def test_a_new_drafter_has_the_widths_of_the_target(name):
    target = Target(make_model(name), CONTEXT, name)
    parsed, given = new_drafter(target, block_size=6).config, FAMILIES[name]
    assert parsed.num_target_layers == target.num_layers
    for field in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size"):
        assert getattr(parsed, field) == given[field]
    assert (parsed.head_dim, parsed.num_attention_heads) == (16, 4)
    assert parsed.rope["rope_theta"] == given["rope_theta"]
    assert parsed.rope["rope_type"] == (given.get("rope_scaling") or {}).get("rope_type", "default")
    assert (parsed.block_size, parsed.mask_token_id) == (6, 5)
    assert parsed.layer_windows == (None, None) and parsed.layer_causal == (False, False)
    assert parsed.aux_layers == spread_aux_layers(target, None, 3)


@pytest.mark.parametrize("kind", ["qwen3", "4 bits"])
def test_a_warm_start_takes_over_the_last_layers_and_the_final_norm_in_float32(kind):
    name = kind if kind in FAMILIES else "llama"
    model = make_model(name)
    if kind == "4 bits":
        model, _ = quantize_model(model, dict(FAMILIES[name]), 32, 4)
    trainee = new_drafter(Target(model, CONTEXT, name), start="target")
    network = trainee.network
    for layer, source in zip(network.layers, model.layers[-2:], strict=True):
        for path in MATRICES:
            found, given = attrgetter(path)(layer).weight, attrgetter(path)(source)
            assert ("scales" in given) == (kind == "4 bits")
            width = found.shape[1]  # what it multiplies with is found by using it
            product = given(mx.eye(width)) - given(mx.zeros((1, width)))
            assert mx.abs(found - product.T).max() < 1e-5
        for path in NORMS:
            assert mx.array_equal(layer[path].weight, source[path].weight).item()
        for path in ("q_norm", "k_norm"):
            own = source.self_attn[path].weight if name == "qwen3" else mx.ones(16)
            assert mx.array_equal(layer.self_attn[path].weight, own).item()
    assert mx.array_equal(network.norm.weight, model.model.norm.weight).item()
    assert {array.dtype for array in arrays_of(network).values()} == {np.dtype(np.float32)}


def test_a_target_of_unknown_widths_or_other_layers_is_refused():
    other = Target(make_model("starcoder2"), CONTEXT, "starcoder2")
    trainee = replace(new_drafter(tiny_target(), layers=2), target=other)
    with pytest.raises(DFlashError, match="starcoder2 .*--start random"):
        take_layers(trainee, [1, 2])
    target = Target(make_model("llama"), CONTEXT, "tiny")
    del target.model.args.intermediate_size
    with pytest.raises(DFlashError, match="tiny .*--init"):
        new_drafter(target)


def test_a_second_version_without_real_convolutions_is_read_and_becomes_a_first(tmp_path):
    method = {"training_mode": "vp_drafter", "output_multiplier": 0.5}
    raw = tiny_config(dflash_config=method, note="mine")
    tensors = idle_tensors(raw)
    found = DFlashTrainee.read(write_drafter_folder(tmp_path, raw, tensors), tiny_target())
    assert found.raw == raw and found.config == FILES.parse_config(raw, "tiny")
    assert "candidate_selector.successor_codebook" in arrays_of(found.network)
    plain = found.without_selector()
    arrays = arrays_of(plain.network)
    assert arrays.keys() == {n for n in tensors if "_conv." not in n and "selector" not in n}
    assert all(np.array_equal(array, tensors[name]) for name, array in arrays.items())
    expected = {"mask_token_id": 5, "target_layer_ids": [0, 2], **method}
    first = {"architectures": ["DFlashDraftModel"], "block_size": 6, "dflash_config": expected}
    assert plain.raw == {**raw, **first}
    assert plain.config == FILES.parse_config(plain.raw, "tiny")
    assert plain.without_selector() is plain


OTHERS = {**FORMATS, **masked_formats.FORMATS}
OTHERS["convolutions"] = tiny_config(), random_tensors(tiny_config())
OTHERS["head, own tables"] = reference_mtp.FORMATS["ours, own tables"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("convolutions", "with convolutions"),
        ("packed", "quantised weights"),
        ("raw", "a head of its own"),
        ("raw, own embedding", "an embedding of its own and a head of its own"),
        ("a2d-qwen3", "an embedding of its own"),
        ("ours, shifted", "shifted logits"),
        ("head, own tables", "an embedding of its own and a head of its own"),
    ],
)
def test_drafters_that_cannot_be_trained_here_are_refused(tmp_path, name, said):
    if name == "packed":
        packed = make_trainee(drafter_config(intermediate_size=128))
        quantize_network(packed.network, 8)
        packed.save(tmp_path)
    else:
        write_drafter_folder(tmp_path, *OTHERS[name])
    with pytest.raises(DFlashError, match=f"{tmp_path} .*{said}") as failure:
        read_trainee(tmp_path, tiny_target())
    assert "in full precision" in failure.value.next_step


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("eagle3", "LlamaForCausalLMEagle3"),
        ("mtp", "MTPDraftModel"),
        ("specdiff", "MaskedDiffusionDraftModel"),
    ],
)
def test_a_run_is_resumed_and_its_drafter_drafts(place, mode, kind):
    for steps in (2, 4):
        place.train(mode=mode, steps=steps, block_size=4)
    assert [record["step"] for record in place.history()] == [0, 2, 4]
    raw = json.loads((place.out / "config.json").read_text())
    assert raw["architectures"] == [kind] and raw["block_size"] == 4
    pair = load_pair(PairConfig(str(place.model), str(place.out)))
    prompt, answers = list(corpus_rows()[0].prompt), []
    for method in ("none", mode):
        session = Session(pair, DecodeConfig(method, max_tokens=12))
        answers.append([token for delta in session.stream(prompt) for token in delta.tokens])
    assert answers[0] == answers[1]
    again = place.root / "again"
    place.train(mode=mode, init=place.out, out=again, steps=1)
    assert (again / "model.safetensors").exists()
