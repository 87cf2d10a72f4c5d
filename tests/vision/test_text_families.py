"""Families that mlx-vlm alone has are targets for words, or are refused by what they keep."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm, the extra vision, is not installed")

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.tree import Tree
from dflash_mlx.verifier.block import Block
from dflash_mlx.vision.opening import opens
from dflash_mlx.vision.target import SeeingTarget
from support.decoding import path_to

pytestmark = pytest.mark.usefixtures("interpreted")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16,
    "dense_intermediate_size": 48, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "vocab_size": 128, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "sliding_window": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 8, "layer_norm_eps": 1e-5, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 512, "moe_layer_freq": 1, "attention_bias": False,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip


def make(family: str) -> Any:
    module = importlib.import_module(f"mlx_vlm.models.{family}")
    kind = getattr(module, "TextConfig", None) or module.ModelConfig
    known = inspect.signature(kind).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known}
    mx.random.seed(0)
    return module.Model(kind.from_dict({"model_type": family, **sizes}))


@pytest.mark.parametrize("family", ["cohere2_moe", "k2_horizon", "klear", "xing4_0"])
def test_nodes_of_trees_have_the_logits_of_mlx_vlm(family):
    assert opens({"model_type": family}), "mlx-lm has none of these"
    whole = make(family)
    target = SeeingTarget(whole, 500, family)
    assert not target.sees and target.takes_trees
    prompt, tokens = [*range(20, 60)], [7, 1, 2, 3, 4, 5]
    tree = Tree(tuple(tokens[1:]), (-1, 0, 0, 1, 2, 4))
    cache = target.new_cache()
    target.forward(mx.array(prompt), cache, Block(len(prompt)))
    cache.commit(range(len(prompt)))
    found, _ = target.forward(mx.array(tokens), cache, Block.of(tree))
    for node in range(len(tree)):
        path = [tokens[i] for i in path_to(tree, node)]
        fresh = whole(mx.array([prompt + path])).logits[0, -1]
        assert float(mx.abs(found[node] - fresh).max()) < 1e-3 * float(mx.std(fresh)), node


@pytest.mark.parametrize(("family", "kept"), [("hy_v4", "CacheList"), ("z1t", "Z1TCache")])
def test_what_cannot_take_a_draft_back_is_refused_by_name(family, kept):
    with pytest.raises(DFlashError, match=f"{family} keeps its state in a {kept}"):
        SeeingTarget(make(family), 500, family)
