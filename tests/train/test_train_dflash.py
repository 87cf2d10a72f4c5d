"""DFlash's drafters: what training starts from, learning by heart, and drafters side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.engine.pair import Pair
from dflash_mlx.train import compare
from dflash_mlx.train.config import TrainConfig
from dflash_mlx.train.dflash import DFlashTrainee
from dflash_mlx.train.trainee import mask_token, spread_aux_layers, take_layers
from dflash_mlx.verifier.model import Target
from support.families import FAMILIES, make_model
from support.reference_dflash import write_drafter_folder
from support.reference_dflash2 import idle_tensors, tiny_config
from support.tiny_training import (
    CONTEXT,
    Place,
    arrays_of,
    corpus_rows,
    drafter_config,
    make_trainee,
    tiny_target,
)

# Drafters side by side


def drafter(place: Place, name: str, seed: int = 0, **changes: object) -> Path:
    make_trainee(drafter_config(**changes), seed).save(place.root / name)
    return place.root / name


def run(place: Place, *drafters: Path, more: tuple[str, ...] = (), **options: object) -> None:
    named = [word for folder in drafters for word in ("--drafter", str(folder))]
    compare.main([*place.data(**{"held_out": 3, **options}), *named, *more])


def test_drafters_are_compared_on_the_held_out_greedy_rows(place, capsys):
    first, second = drafter(place, "a"), drafter(place, "b", seed=1, block_size=4)
    run(place, first, second, json=place.root / "figures.json")
    figures = json.loads((place.root / "figures.json").read_text())
    assert figures.keys() == {str(first), str(second)}
    for folder, size in ((first, 8), (second, 4)):
        assert figures[str(folder)].keys() == {"all", "tiny"}
        found = figures[str(folder)]["all"]
        assert found == figures[str(folder)]["tiny"]
        assert found["texts"] == 2  # rows 0 and 3; row 6 is sampled
        assert len(found["by_position"]) == len(found["by_prefix"]) == size - 1
        assert found["tokens_per_round"] == pytest.approx(1 + sum(found["by_position"]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4 and f"{first} (all)" in lines[2]
    run(place, first, held_out=None, json=place.root / "j", more=("--all-rows",))
    greedy = sum(row.temperature == 0 for row in corpus_rows())
    assert json.loads((place.root / "j").read_text())[str(first)]["all"]["texts"] == greedy < 7


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"held_out": 1}, "held_out is 1"),
        ({"json": "nowhere/j.json"}, "nowhere/j.json"),
        ({"drafter": "other"}, "different layers"),
    ],
)
def test_what_cannot_be_compared_is_refused(place, options, named):
    folders = [drafter(place, "a")]
    if options.pop("drafter", None):
        folders.append(drafter(place, "other", dflash_config={"target_layer_ids": [0, 1]}))
    with pytest.raises(DFlashError, match=named) as failure:
        run(place, *folders, **options)
    assert failure.value.next_step


# What training starts from

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
