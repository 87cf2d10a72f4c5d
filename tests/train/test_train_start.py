"""What training starts from: the target's last layers, noise, or a drafter that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.networks.quantized import quantize_network
from dflash_mlx.engine.pair import Pair
from dflash_mlx.models.load import load_target
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.trainee import mask_token, spread_aux_layers, take_layers
from dflash_mlx.verifier.model import Target
from support.drafter_formats import DRAFT_IDS, own_tables, speculators, version_1
from support.families import FAMILIES, make_model
from support.models import write_model
from support.reference_dflash import random_drafter, write_drafter_folder
from support.reference_dflash2 import idle_tensors, random_tensors, tiny_config
from support.tiny_training import (
    CONTEXT,
    arrays_of,
    drafter_config,
    make_trainee,
    tiny_target,
)

MATRICES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MATRICES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm"]


def new_drafter(target: Target, **settings: Any) -> DFlashTrainee:
    """A new drafter of the target's widths: noise, unless settings say more."""
    config = TrainConfig(**{"steps": 1, "layers": 2, "start": "random", **settings})
    return DFlashTrainee.new(config, Pair(target, SimpleNamespace(mask_token_id=5)))


# Which layers are read


@pytest.mark.parametrize("count", range(1, 9))
def test_taps_are_layers_of_the_target_in_order(count):
    assert spread_aux_layers(30, 5) == (
        1,
        8,
        14,
        20,
        27,
    )  # as published drafters read thirty layers
    for layers in range(1, 80):
        aux_layers = spread_aux_layers(layers, count)
        assert 1 <= len(aux_layers) <= count
        assert list(aux_layers) == sorted(set(aux_layers))
        assert aux_layers[0] >= 0 and aux_layers[-1] < layers
        if layers >= count + 3:
            assert len(aux_layers) == count
            assert aux_layers[-1] == layers - 3
            assert count == 1 or aux_layers[0] == 1


# The mask token


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


@pytest.mark.parametrize(
    ("special", "template", "mask", "expected"),
    [
        ([1, 2, 3, 9], [5], 4, 4),
        ([1, 2, 3, 5, 8, 9], [5], None, 9),
        ([9, 8, 1, 2, 3, 5], [5, 9], None, 8),
        ([1, 2, 3, 6, 7], [5], None, 6),
        ([1, 2, 3, 6], None, None, 6),
        ([0, 1, 2, 3], [5], 0, 0),
    ],
    ids=["its own", "a spare one", "the last", "no role's", "no template", "token 0"],
)
def test_the_mask_is_a_token_that_no_conversation_contains(special, template, mask, expected):
    assert mask_token(words(special, template, mask)) == expected
    with pytest.raises(DFlashError, match="mask; .*--init"):
        mask_token(words([1, 2, 3, 5, 7], [5], None))


def test_a_real_tokenizer_has_a_mask(tmp_path):
    folder = write_model(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "additional_special_tokens": ["<|im_start|>", "#"]}))
    tokenizer = load_target(str(folder)).tokenizer
    assert tokenizer.decode([mask_token(tokenizer)]) == "#"  # <|im_start|> is in every prompt


# A new drafter


@pytest.mark.parametrize("name", ["llama3_rope", "qwen2", "qwen3", "gemma2"])
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
    assert parsed.target_layer_ids == spread_aux_layers(given["num_hidden_layers"], 3)


def test_a_target_that_does_not_say_its_widths_is_refused():
    target = Target(make_model("llama"), CONTEXT, "tiny")
    del target.model.args.intermediate_size
    with pytest.raises(DFlashError, match="tiny .*--init"):
        new_drafter(target)


def test_noise_depends_on_the_seed_alone():
    drafters = [new_drafter(tiny_target(), seed=seed) for seed in (3, 3, 4)]
    first, again, other = (arrays_of(drafter.network) for drafter in drafters)
    for name, array in first.items():
        assert np.array_equal(array, again[name])
        if array.ndim == 1:
            assert (array == 1).all()
        else:
            assert not np.array_equal(array, other[name])
            assert 0.01 < array.std() < 0.03
    matrices = [array.tobytes() for array in first.values() if array.ndim == 2]
    assert len(set(matrices)) == len(matrices)


# The target's last layers


def linear(module: Any) -> np.ndarray:
    """The matrix that a layer, quantised or not, multiplies with, found by using it."""
    inputs = module.scales.shape[-1] * module.group_size if "scales" in module else None
    width = inputs or module.weight.shape[-1]
    product = module(mx.eye(width)) - module(mx.zeros((1, width)))
    return np.array(product).T


def module_at(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = layer[name]
    return layer


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "4 bits", "bfloat16"])
def test_a_warm_start_takes_over_the_last_layers_and_the_final_norm_in_float32(kind):
    name = kind if kind in FAMILIES else "llama"
    model = make_model(name)
    if kind == "4 bits":
        model, _ = quantize_model(model, dict(FAMILIES[name]), 32, 4)
    if kind == "bfloat16":
        model.set_dtype(mx.bfloat16)
    trainee = new_drafter(Target(model, CONTEXT, name), start="target")
    network = trainee.network
    for layer, source in zip(network.layers, model.layers[-2:], strict=True):
        for path in MATRICES:
            found, given = np.array(module_at(layer, path).weight), module_at(source, path)
            assert ("scales" in given) == (kind == "4 bits")
            assert np.abs(found - linear(given)).max() < 1e-5
        for path in NORMS:
            assert mx.array_equal(layer[path].weight, source[path].weight).item()
        for path in ("q_norm", "k_norm"):
            own = source.self_attn[path].weight if name == "qwen3" else mx.ones(16)
            assert mx.array_equal(layer.self_attn[path].weight, own).item()
    assert mx.array_equal(network.norm.weight, model.model.norm.weight).item()
    assert {array.dtype for array in arrays_of(network).values()} == {np.dtype(np.float32)}


def test_a_warm_start_passes_the_last_tap_through():
    trainee = DFlashTrainee.fresh(
        drafter_config(dflash={"target_layer_ids": [0, 1, 2]}), tiny_target(), 0
    )
    network, d = trainee.network, trainee.config.hidden_size
    before = network.fc.weight
    take_layers(trainee, [1, 2])
    assert network.fc.weight.shape == (d, 3 * d)
    assert mx.array_equal(network.fc.weight[:, -d:], mx.eye(d)).item()
    assert mx.array_equal(network.fc.weight[:, :-d], before[:, :-d]).item()


def test_a_target_whose_layers_cannot_be_taken_over_is_refused():
    other = Target(make_model("starcoder2"), CONTEXT, "starcoder2")
    trainee = replace(new_drafter(tiny_target(), layers=2), target=other)
    with pytest.raises(DFlashError, match="starcoder2 .*--start random"):
        take_layers(trainee, [1, 2])


@pytest.mark.parametrize(("settings", "named"), [({"layers": 4}, "3"), ({"taps": 4}, "taps is 4")])
def test_more_than_the_target_has_is_refused_before_anything_is_made(settings, named):
    with pytest.raises(DFlashError, match=named):
        new_drafter(tiny_target(), **settings)


# An existing drafter


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


HALF = speculators(draft_vocab_size=len(DRAFT_IDS))
TABLES = own_tables(DRAFT_IDS)
EMBEDDING = {"embed_tokens.weight": TABLES["embed_tokens.weight"]}
UNTRAINED = {
    "convolutions": (tiny_config(), random_tensors(tiny_config())),
    "its own vocabulary": (HALF, {**random_drafter(version_1()), **TABLES}),
    "its own embedding": (speculators(), {**random_drafter(version_1()), **EMBEDDING}),
    "packed": None,
}


@pytest.mark.parametrize("kind", UNTRAINED)
def test_drafters_that_cannot_be_trained_here_are_refused(tmp_path, kind):
    if (given := UNTRAINED[kind]) is None:
        packed = make_trainee(drafter_config(intermediate_size=128))
        quantize_network(packed.network, 8)
        packed.save(tmp_path)
    else:
        write_drafter_folder(tmp_path, *given)
    with pytest.raises(DFlashError, match=str(tmp_path)) as failure:
        DFlashTrainee.read(tmp_path, tiny_target())
    assert "in full precision" in failure.value.next_step
