"""The table of methods: what `auto` is, and which settings belong to whom."""

from __future__ import annotations

import pytest

from dflash_mlx.core.config import AUTO, DecodeConfig, PairConfig, SamplingConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters.methods import (
    METHODS,
    check_given,
    check_uses,
    choices,
    find_method,
    given,
    settle,
    takers,
    why_auto,
)
from dflash_mlx.engine.pair import Capabilities, Preset
from support.configs import config_with

WARM = SamplingConfig(temperature=0.7)
TWO, ONE, NO = Capabilities(("dflash",) * 2), Capabilities(("dflash",)), Capabilities()
MASKED, EAGLE, UNKNOWN = (
    Capabilities(("specdiff",)),
    Capabilities(("eagle3",)),
    Capabilities((None, None)),
)
CHAINS = Capabilities(("dflash",) * 2, trees=False)
DDTREE = Capabilities(("dflash",) * 2, preset=Preset("ddtree"))


@pytest.mark.parametrize(
    ("settings", "capabilities", "method"),
    [
        ({}, TWO, "d2sd"),
        ({}, ONE, "ddtree"),
        ({}, NO, "ngram"),
        ({}, CHAINS, "dflash"),
        ({}, DDTREE, "ddtree"),
        ({}, Capabilities(("toy",)), "ngram"),
        ({}, MASKED, "specdiff"),
        ({}, Capabilities(("specdiff",), trees=False), "specdiff"),
        ({"block_size": 4}, MASKED, "specdiff"),
        ({"steps": 4}, MASKED, "specdiff"),
        ({}, EAGLE, "eagle3"),
        ({}, Capabilities(("eagle3",), trees=False), "eagle3"),
        ({}, Capabilities(("dflash", "eagle3")), "ddtree"),
        ({"branches": 4}, EAGLE, "eagle3"),
        ({}, Capabilities(("assistant",)), "assistant"),
        ({}, Capabilities(("dflash", "assistant")), "ddtree"),
        ({}, Capabilities(("mtp",)), "mtp"),
        ({}, Capabilities(("dflash", "mtp")), "ddtree"),
        ({}, Capabilities(("lm",)), "lm"),
        ({}, Capabilities(("lm",), trees=False), "lm"),
        ({"branches": 4}, UNKNOWN, "d2sd"),
        ({"block_size": 4}, UNKNOWN, "d2sd"),
        ({"steps": 2}, UNKNOWN, "specdiff"),
        ({"steps": 2}, TWO, "d2sd"),
        ({"branches": 4}, DDTREE, "d2sd"),
        ({"branches": 3}, ONE, "d2sd"),
        ({"branches": 3}, CHAINS, "dflash"),
        ({"second_block_size": 4}, DDTREE, "d2sd"),
        ({"budget": 16}, DDTREE, "ddtree"),
        ({"budget": 16}, NO, "ngram"),
        ({"lookup": False}, TWO, "d2sd"),
        ({"acceptance": "reject", "sampling": WARM}, TWO, "dflash"),
        ({"acceptance": "reject", "sampling": WARM}, NO, "ngram"),
        ({"acceptance": "reject"}, TWO, "d2sd"),
        ({"acceptance": "match", "sampling": WARM}, TWO, "d2sd"),
        ({"method": "none", "branches": 3}, TWO, "none"),
    ],
)
def test_auto_is_what_the_pair_serves_the_settings_ask_for_and_the_registry_advises(
    settings, capabilities, method
):
    assert settle(config_with(**settings), capabilities).method == method


def test_settings_of_one_method_are_given_when_they_are_not_the_default():
    assert given(DecodeConfig(max_tokens=3, exact=True)) == {}
    assert set(given(config_with(branches=4, lookup=False))) == {"branches", "lookup"}
    assert takers("second_block_size") == ("d2sd",) and takers("max_tokens") == ()


@pytest.mark.parametrize(
    ("method", "settings", "owners"),
    [
        ("ngram", {"branches": 3}, "d2sd"),
        ("dflash", {"budget": 16}, "ddtree, d2sd"),
        ("ddtree", {"second_block_size": 4}, "d2sd"),
        ("ddtree", {"acceptance": "reject"}, "dflash"),
        (
            "none",
            {"block_size": 4},
            "dflash, ddtree, d2sd, specdiff, eagle3, assistant, mtp, lm, ngram",
        ),
        ("ddtree", {"steps": 2}, "specdiff"),
        ("d2sd", {"steps": 2}, "specdiff"),
    ],
)
def test_a_setting_of_another_method_is_refused_with_the_methods_that_have_it(
    method, settings, owners
):
    name, value = next(iter(settings.items()))
    with pytest.raises(DFlashError, match=f"{name} is {value}.*{method}.*{owners}"):
        check_given(config_with(method, **settings))
    for owner in (AUTO, *owners.split(", ")):
        check_given(config_with(owner, **settings))


@pytest.mark.parametrize(
    ("settings", "refused", "taken"),
    [
        ({"drafter": "x"}, ("none", "ngram"), ("dflash", "resample")),
        ({"drafter_bits": 8}, ("ngram",), ("ddtree",)),
        ({"draft_window": 9}, ("none",), ("d2sd",)),
        ({"draft_vocabulary": 9}, ("none",), ("dflash",)),
        ({"second_drafter": "x"}, ("none", "dflash", "ddtree"), ("d2sd",)),
    ],
)
def test_settings_of_draft_models_are_refused_where_no_method_in_use_has_one(
    settings, refused, taken
):
    config, (name,) = PairConfig(**settings), settings
    with pytest.raises(DFlashError, match=f"{name} is .*{refused[-1]} do"):
        check_given(config, *refused)
    check_given(config, *refused, AUTO)
    for method in taken:
        check_given(config, *refused, method)


def test_no_drafter_is_none_for_any_method():
    check_given(PairConfig(drafter="none", second_drafter="none"), "none")


def test_settings_that_decide_what_auto_is_are_named():
    assert "d2sd" in why_auto(config_with(branches=3), DDTREE)
    assert "branches" in why_auto(config_with(branches=3), DDTREE)
    for silent in (DecodeConfig(), DecodeConfig(budget=16), config_with("d2sd", branches=3)):
        assert why_auto(silent, DDTREE) == ""


def test_unknown_methods_are_refused_by_name_and_controls_are_not_offered():
    with pytest.raises(DFlashError, match="method is 'fast'; choose one of auto, none, dflash"):
        settle(DecodeConfig("fast"), TWO)
    assert "resample" in METHODS and "resample" not in choices()


def test_a_use_that_the_pair_cannot_serve_is_refused_before_weights_are_read():
    with pytest.raises(DFlashError, match="none is known"):
        check_uses([DecodeConfig("dflash")], [], NO, "none is known")
    with pytest.raises(DFlashError, match="^block_size is 9.*blocks of 8"):
        check_uses([DecodeConfig("d2sd", block_size=9)], [8, 12], TWO, "")
    with pytest.raises(DFlashError, match="second_block_size is 7.*blocks of 6"):
        check_uses([config_with("d2sd", second_block_size=7)], [8, 6], TWO, "")
    check_uses([DecodeConfig("d2sd", block_size=7), DecodeConfig("ngram")], [8, 6], TWO, "")


def test_a_method_for_two_draft_models_is_called_otherwise_where_there_is_one():
    d2sd, both = find_method("d2sd"), Capabilities(("dflash", "dflash"))
    assert d2sd.called(Capabilities(("dflash",))) != d2sd.called(both)
    assert d2sd.called(Capabilities(("dflash", "eagle3"))) == d2sd.called(Capabilities(("dflash",)))
