"""Pairs whose numbers exceed float16 are cast to a wider type when loaded, and then draft well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.block_diffusion import BlockDiffusion
from dflash_mlx.drafters.dflash.block_model import BlockModel
from dflash_mlx.drafters.dflash.checkpoint import FILES
from dflash_mlx.drafters.dflash.network import Network, NetworkConfig
from dflash_mlx.drafters.none import NoDraft
from dflash_mlx.models.read import fit_drafter, fit_target
from dflash_mlx.verifier.model import Target
from support.decoding import answer_rounds, tokens_in
from support.families import FAMILIES, make_model
from support.overrides import override
from support.reference_dflash import random_drafter, tiny_drafter_config, write_drafter_folder

WIDTH = 64
PROMPT = [3, 14, 15, 92, 65, 35]
DIRECTION = np.where(np.random.default_rng(0).random(WIDTH) < 0.5, -1, 1).astype(np.float32)


def make_target(size: float, dtype: mx.Dtype = mx.float16) -> Target:
    """A tiny llama whose layers each add `size` to the residual stream, always in one direction.

    So it always says the same token, which is easily foretold, and 30000 overflows float16 in the
    third layer, while every weight still fits.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "biased", {**FAMILIES["llama"], "attention_bias": True})
        model = make_model("biased")
    for layer in model.layers:
        layer.self_attn.o_proj.bias = mx.array(size * DIRECTION)
    model.set_dtype(mx.float16)
    model.set_dtype(dtype)
    return Target(model, 200, "biased")


def make_drafter(
    folder: Path, gain: float = 1.0, dtype: mx.Dtype = mx.float16
) -> tuple[Network, NetworkConfig]:
    """A drafter that says again what the target's last layer says: its features pass through.

    gain: of the projection of the features; a norm behind it takes it out again.
    """
    raw = tiny_drafter_config(
        num_target_layers=3,
        num_key_value_heads=4,
        num_hidden_layers=1,
        dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 2]},
    )
    tensors = {name: np.zeros_like(tensor) for name, tensor in random_drafter(raw).items()}
    for name in ("hidden_norm.weight", "norm.weight"):
        tensors[name][:] = 1
    tensors["layers.0.input_layernorm.weight"][:] = 1e-3  # little of the block's own values
    tensors["fc.weight"][:, WIDTH:] = gain * np.eye(WIDTH)
    tensors["layers.0.self_attn.v_proj.weight"][:] = np.eye(WIDTH)
    tensors["layers.0.self_attn.o_proj.weight"][:] = 100 * np.eye(WIDTH)
    config = FILES.read_drafter(write_drafter_folder(folder, raw, tensors)).config
    return FILES.load_network(folder, config, dtype), config


def answer(target: Target, drafter: Any) -> tuple[list[int], float]:
    """The answer's tokens, and how many of them come from a round."""
    rounds = list(answer_rounds(target, drafter, PROMPT, DecodeConfig(max_tokens=32)))[1:]
    tokens = tokens_in(delta.accepted for delta in rounds)
    return tokens, len(tokens) / len(rounds)


def drafted(target: Target, *drafter: Any) -> tuple[list[int], float]:
    return answer(target, BlockDiffusion(BlockModel(*drafter, target)))


def fit(target: Target, network: Network, config: NetworkConfig) -> tuple[str, ...]:
    """As loading does it."""
    notes = fit_target(target, config.aux_layers)
    return (*notes, *fit_drafter(BlockModel(network, config, target), target))


def dtypes(model: Any) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


def test_a_target_that_overflows_computes_in_float32_and_says_so(tmp_path):
    target, exact = make_target(30000), make_target(30000, mx.float32)
    network, config = make_drafter(tmp_path)
    expected, _ = answer(exact, NoDraft())
    assert drafted(target, network, config)[0] != expected, "without the check it is nonsense"
    notes = fit(target, network, config)
    assert notes[0] == "the numbers of biased exceed float16, so it computes in float32"
    assert dtypes(target.model) == {mx.float32}
    tokens, accepted = drafted(target, network, config)
    assert tokens == expected and accepted > 4


def test_a_target_near_the_end_of_the_range_is_cast_before_other_tokens_exceed_it():
    for size, dtype in ((12000, mx.float32), (8000, mx.float16)):  # x 3: up to 65,504 can be
        target = make_target(size)
        assert bool(fit_target(target, (0, 2))) == (dtype == mx.float32)
        assert target.dtype == dtype


def test_a_drafter_that_overflows_alone_leaves_the_target_as_it_is(tmp_path):
    target = make_target(30)
    network, config = make_drafter(tmp_path, gain=3000)
    plain, _ = answer(target, NoDraft())
    assert drafted(target, network, config) == (plain, 1)
    (note,) = fit(target, network, config)
    assert dtypes(network).isdisjoint({mx.float16})
    assert dtypes(target.model) == {mx.float16}
    assert "drafter for biased exceed float16, so it computes in " in note
    tokens, accepted = drafted(target, network, config)
    assert tokens == plain and accepted > 4


@pytest.mark.parametrize(
    ("trained", "exact", "becomes"),
    [
        (mx.bfloat16, 1, mx.bfloat16),
        (mx.float32, 1, mx.float32),
        (mx.bfloat16, 1 + 2**-10, mx.float32),  # one weight that was never bfloat16 is enough
    ],
    ids=str,
)
def test_weights_that_were_bfloat16_become_that_again(trained, exact, becomes):
    target = make_target(30000)
    weights = tree_map(lambda a: a.astype(trained).astype(mx.float16), target.model.parameters())
    target.model.update(weights)
    target.model.layers[-1].mlp.down_proj.weight[3, 5] = exact
    weights = tree_flatten(target.model.parameters())
    (note,) = fit_target(target, ())
    assert note.endswith(str(becomes).removeprefix("mlx.core."))
    assert dtypes(target.model) == {becomes}
    for (_, cast), (_, before) in zip(
        tree_flatten(target.model.parameters()), weights, strict=True
    ):
        assert mx.array_equal(cast.astype(mx.float16), before)


@pytest.mark.parametrize(
    ("tokens", "rows", "refused"), [([1, 50, 96], slice(None), False), ([50], slice(3, 5), True)]
)
def test_tokens_that_a_family_never_says_are_not_beyond_the_range_others_are(tokens, rows, refused):
    """As mlx-lm's phi3small gives the ids that stand for nothing -inf in every row of a pass."""

    def masked(model: Any, forward: Any, *args: Any, **kwargs: Any) -> mx.array:
        logits = forward(model, *args, **kwargs)
        chances = mx.zeros(logits.shape[1:], logits.dtype)
        chances[rows, mx.array(tokens)] = -mx.inf
        return logits + chances

    target = make_target(1)
    override(target.model, masked)
    if refused:
        with pytest.raises(DFlashError, match="infinite numbers"):
            fit_target(target, ())
    else:
        assert fit_target(target, ()) == () and target.dtype == mx.float16


def test_pairs_that_fit_keep_their_type(tmp_path):
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        target = make_target(1, dtype)
        network, config = make_drafter(tmp_path, dtype=dtype)
        assert fit(target, network, config) == ()
        assert target.dtype == dtype and dtypes(network) == {dtype}


def test_what_no_type_helps_is_refused_by_name_with_a_way_to_go_on(tmp_path):
    target = make_target(1)
    network, config = make_drafter(tmp_path)
    network.fc.weight = network.fc.weight * mx.inf
    with pytest.raises(DFlashError, match=r"the drafter for biased .*; .* or use method=.ngram"):
        fit(target, network, config)
    target.model.model.norm.weight = target.model.model.norm.weight * mx.nan
    with pytest.raises(DFlashError, match=r"biased computes infinite numbers.*; download"):
        fit_target(target, ())
