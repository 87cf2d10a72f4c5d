"""Mixtures on paper: their sizes, what rows touch, and that nobody beats who knows more."""

from __future__ import annotations

import experts
import numpy as np
import pytest

# Billions of weights, by the models' cards; of gpt-oss our router and experts have no biases
BILLIONS = {"Qwen3-30B-A3B": 30.5, "Mixtral 8x7B": 46.7, "gpt-oss-20b": 20.9}
SMALL = experts.mixture("small", 6, 2048, (32, 4, 128), 768, 64, 4, 32_000)


@pytest.mark.parametrize("target", experts.TARGETS, ids=lambda target: target.name)
def test_a_target_has_its_published_size(target):
    assert target.parameters / 1e9 == pytest.approx(BILLIONS[target.name], rel=0.01)


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_rows_without_a_common_text_touch_what_chance_says_and_fewer_with_favourites(skew):
    router = experts.Router(SMALL, skew, np.random.default_rng(1))
    found = experts.on_average([router(np.arange(16), 16) for _ in range(20)], experts.SIZES[:5])
    by_chance = [SMALL.chosen(rows) for rows in found]
    even = pytest.approx(by_chance, rel=0.03)
    assert [*found.values()] == even if skew == 0 else found[16] < 0.9 * by_chance[-1]


def test_a_tree_is_closed_under_parents_and_its_likeliest_nodes_come_first():
    reach, parents, tokens = experts.tree(np.random.default_rng(2))
    assert len(reach) == len(tokens) == experts.SIZES[-1] and parents[0] == -1
    assert (np.diff(reach) <= 0).all() and (parents < np.arange(len(parents))).all()


def test_knowing_every_nodes_experts_brings_no_less_than_knowing_how_many_rows_touch():
    rng = np.random.default_rng(3)
    router, costs = experts.Router(SMALL, 0.6, rng), experts.Costs(SMALL, 2048)
    for reach, parents, tokens in [experts.tree(rng) for _ in range(5)]:
        each = experts.Round(reach, parents, router(tokens))
        believed = experts.on_average([each.touches], experts.SIZES)
        rows = experts.by_rows(each, costs, believed)
        own = experts.by_experts(each, costs, believed)
        assert {*parents[own]} <= {-1, *own}, "closed under parents"
        rates = [each.reach[n].sum() / costs.seconds(len(n), each.union(n)) for n in (rows, own)]
        assert rates[1] >= rates[0]
