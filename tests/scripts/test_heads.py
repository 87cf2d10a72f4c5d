"""Heads on the roofline: sizes against mlx-lm and published files, shared experts, and the page."""

from __future__ import annotations

from importlib import import_module
from itertools import combinations, product
from math import prod
from pathlib import Path
from statistics import mean

import heads
import pytest
from mlx.utils import tree_flatten
from roofline_data import MACHINES

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "2026-11-26-heads.md"
MACHINE = MACHINES["M4 Max"]


def config_of(target: heads.Qwen35) -> dict[str, object]:
    """As published; what its numbers follow from, see the page."""
    experts = {
        "num_experts": target.experts,
        "num_experts_per_tok": target.used,
        "moe_intermediate_size": target.expert_hidden,
        "shared_expert_intermediate_size": target.hidden,
        "norm_topk_prob": True,
    }
    return {
        "model_type": "qwen3_5",
        "hidden_size": target.width,
        "num_hidden_layers": target.layers,
        "intermediate_size": target.hidden,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.dim,
        "vocab_size": target.vocabulary,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": target.values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
        **(experts if target.experts else {}),
    }


@pytest.mark.parametrize("target", [heads.DENSE, heads.MOE], ids=lambda target: target.name)
def test_a_target_is_as_large_as_mlx_lm_s_which_is_built_without_its_weights(target):
    module = import_module("mlx_lm.models.qwen3_5")
    model = module.TextModel(module.TextModelArgs.from_dict(config_of(target)))
    shapes = [array.shape for _, array in tree_flatten(model.parameters())]
    assert target.target.parameters == pytest.approx(sum(map(prod, shapes)), rel=1e-3)
    caches = [cache for cache in model.make_cache() if type(cache).__name__ == "KVCache"]
    assert target.target.cached == len(caches) * 2 * target.kv_heads * target.dim


@pytest.mark.parametrize("network", [heads.LARGE, heads.SMALL], ids=lambda network: network.name)
def test_a_qwen3_has_the_weights_of_its_name(network):
    billions = float(network.name.removeprefix("Qwen3-").removesuffix("B"))
    assert network.parameters == pytest.approx(billions * 1e9, rel=0.025)


def test_heads_and_drafters_fill_the_files_that_are_published():
    small = heads.Qwen35("Qwen3.5-9B", 32, 4096, 16, 4, 32, 12_288)
    published = {  # mlx-community/Qwen3.5-9B-MTP-bf16, Qwen3.6-27B-MTP-4bit; z-lab's of the 27B
        (small.mtp, 16): 486_582_779,
        (heads.DENSE.mtp, 4): 247e6,
        (heads.DRAFTS[heads.DENSE.target][-1].network, 16): 3.22 * 2**30,
    }
    for (network, bits), size in published.items():
        assert heads.weight_bytes(network.parameters, bits) == pytest.approx(size, rel=0.04)


def test_rows_share_experts_as_often_as_even_choices_meet():
    network = heads.Network("by hand", 1, 0, 0, 0, expert=1, experts=4, used=2)
    choices = [set(some) for some in combinations(range(4), 2)]
    for rows in (1, 2, 3):
        met = mean(len(set().union(*some)) for some in product(choices, repeat=rows))
        assert network.chosen(rows) == pytest.approx(met)


def test_a_round_is_its_drafts_and_a_pass_over_them_and_the_anchor():
    target, drafter = heads.DENSE.target, heads.DRAFTS[heads.DENSE.target][0]
    one = heads.draft_time(MACHINE, target, drafter, 1, False)
    both = heads.weight_bytes(drafter.network.dense, 4) + heads.weight_bytes(target.head, 4)
    assert one == pytest.approx(both / (MACHINE.bandwidth * 1e9 * 0.82), rel=0.1)
    verify = heads.pass_time(MACHINE, target, 4, 4, False).seconds
    took = heads.round_time(MACHINE, target, drafter, 3, False)
    assert took == pytest.approx(3 * one + verify)
    gain, drafts = heads.speedup(MACHINE, target, drafter, heads.Accepted(1.9, 1), False)
    plain = heads.pass_time(MACHINE, target, 4, 1, False).seconds
    assert drafts == 1 and gain == pytest.approx(
        1.9 * plain / heads.round_time(MACHINE, target, drafter, 1, False)
    )


def test_with_mlx_s_products_a_head_pays_from_the_m3_on_and_a_dflash_more_than_it():
    drafter, *_, block, _ = heads.DRAFTS[heads.DENSE.target]
    target = heads.DENSE.target
    for machine in MACHINES.values():
        known = (heads.HIGH, heads.MIDDLE, heads.LOW)
        stock = [heads.speedup(machine, target, drafter, each, True)[0] for each in known]
        own = [heads.speedup(machine, target, drafter, each, False)[0] for each in known]
        assert max(stock) < 1 if machine.name.startswith(("M1", "M2")) else min(stock) > 1.5
        assert min(own) > 1.5
        head = heads.speedup(machine, target, drafter, heads.HEAD_OF_7, False)[0]
        assert heads.speedup(machine, target, block, heads.DFLASH2_OF_7, False)[0] > head


def test_the_page_has_the_tables_that_the_script_prints():
    kept = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    printed = [line for line in heads.report().splitlines() if line.startswith("| ")]
    assert len(printed) > 60 and set(printed) <= set(kept)
