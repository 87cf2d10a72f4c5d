"""Names of methods and sweeps become settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_mlx.benchmark.selection import expand, largest_block, read_methods, settle_all
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.drafters import paper
from dflash_mlx.engine.pair import Capabilities, Pair
from support.configs import config_with

BLOCKS = {"dflash": 6, "specdiff": 3}  # the largest, by method


def methods(names: str, **settings: object) -> dict[str, DecodeConfig]:
    return read_methods(names, config_with(**settings), paper.KNOBS)


def test_settings_behind_a_name_replace_those_of_the_command_line():
    found = methods("dflash:4,ddtree:budget=16,d2sd:6:growth=paper:branches=2", budget=9)
    assert list(found) == ["none", "dflash:4", "ddtree:budget=16", "d2sd:6:growth=paper:branches=2"]
    assert found["dflash:4"].block_size == 4
    assert (found["ddtree:budget=16"].budget, found["dflash:4"].budget) == (16, 9)
    last = found["d2sd:6:growth=paper:branches=2"]
    assert (last.block_size, last.options.growth, last.options.branches) == (6, "paper", 2)
    assert last.budget is None, "nothing cuts the published tree"
    both = methods("d2sd:growth=paper,ddtree", budget=9)
    assert (both["d2sd:growth=paper"].budget, both["ddtree"].budget) == (None, 9)
    (_, masked) = methods("specdiff:8:steps=4:schedule=left-to-right").values()
    options = masked.options
    assert (masked.block_size, options.steps, options.schedule) == (8, 4, "left-to-right")
    assert methods("ddtree:budget=auto", budget=9)["ddtree:budget=auto"].budget is None
    assert not methods("d2sd:lookup=off")["d2sd:lookup=off"].lookup
    assert methods("d2sd:lookup=on", lookup=False)["d2sd:lookup=on"].lookup


@pytest.mark.parametrize(
    ("names", "message", "sweep"),
    [
        ("", "method is ''", "block"),
        ("dflash:²", "'²'", "block"),
        ("d2sd:lookup=no", "'no'", "block"),
        ("dflash:speed=2", "sets 'speed'", "block"),
        ("dflash:branches=2", "sets 'branches', which dflash does not have", "block"),
        ("none:4", "sets 'block', which none does not have", "block"),
        ("dflash:4:5", "'dflash:4:5' sets the block twice", "block"),
        ("dflash:budget=2:budget=3", "'dflash:budget=2", "block"),
        ("ddtree,dflash,ddtree", "'ddtree' comes twice", "block"),
        ("ddtree:budget=999", "budget is 999 in 'ddtree:budget=999'", "block"),
        ("d2sd:growth=paper:budget=8", "never cuts its tree, but the budget is 8", "block"),
        ("d2sd:steps=2", "sets 'steps', which d2sd does not have", "block"),
        ("specdiff:steps=2:schedule=any", "'any'.*'specdiff:steps=2:schedule=any'", "block"),
        ("d2sd", "'speed'", "speed"),
        ("d2sd", "budget in 'budget=' is ''", "budget="),
        ("d2sd", "'many'", "budget=4,many"),
        ("d2sd", "'auto'", "block=auto"),
        ("d2sd", "budget is 1", "budget=1"),
        ("dflash", "no method has a budget", "budget"),
    ],
)
def test_a_setting_or_a_sweep_that_makes_no_sense_is_refused(names, message, sweep):
    with pytest.raises(DFlashError, match=message) as failure:
        expand(sweep, methods(names), BLOCKS.get)
    assert failure.value.next_step


def test_a_sweep_runs_every_value_of_the_methods_that_have_the_setting():
    plan, sweep = expand("budget=auto,8,16", methods("dflash,ddtree,d2sd:4"), BLOCKS.get)
    assert sweep["setting"] == "budget"
    assert sweep["lines"] == {
        name: {value: f"{name}:budget={value}" for value in ("auto", "8", "16")}
        for name in ("ddtree", "d2sd:4")
    }
    swept = [run for found in sweep["lines"].values() for run in found.values()]
    assert list(plan) == ["none", "dflash", *swept]
    assert [plan[f"d2sd:4:budget={v}"].budget for v in ("auto", "8", "16")] == [None, 8, 16]
    assert plan["d2sd:4:budget=8"].block_size == 4


@pytest.mark.parametrize(
    ("sweep", "names", "expected"),
    [
        (
            "block",
            "dflash,specdiff",
            [*(f"dflash:block={n}" for n in (2, 3, 4, 6)), "specdiff:block=2", "specdiff:block=3"],
        ),
        ("budget", "ddtree", [f"ddtree:budget={n}" for n in ("auto", 4, 8, 16, 32, 48)]),
        ("block=4", "dflash:6,ddtree:budget=4", ["dflash:6", "ddtree:budget=4:block=4"]),
        ("budget=4", "d2sd:growth=paper,ddtree", ["d2sd:growth=paper", "ddtree:budget=4"]),
        (
            "branches=2",
            "dflash,d2sd,d2sd:growth=paper,resample",
            ["dflash", "d2sd:branches=2", "d2sd:growth=paper:branches=2", "resample:branches=2"],
        ),
        ("steps", "specdiff,dflash", [*(f"specdiff:steps={n}" for n in (1, 2, 4)), "dflash"]),
        ("block=4,8", "auto", ["auto:block=4", "auto:block=8"]),
    ],
)
def test_a_sweep_leaves_alone_what_has_no_such_setting_or_its_own_value(sweep, names, expected):
    assert list(expand(sweep, methods(names), BLOCKS.get)[0]) == ["none", *expected]


def test_the_largest_block_of_a_method_is_that_of_the_first_draft_model_that_it_runs():
    sizes: Any = (("eagle3", 4), ("dflash", 12), ("dflash", 8), ("specdiff", 6))
    drafters: Any = tuple(SimpleNamespace(family=f, block_size=size) for f, size in sizes)
    target: Any = None
    largest = {"dflash": 12, "d2sd": 12, "eagle3": 4, "specdiff": 6, "ngram": 16}
    pair = Pair(target, None, drafters)
    assert {method: largest_block(pair, method) for method in largest} == largest
    assert largest_block(Pair(target, None), "ngram") == 16


@pytest.mark.parametrize(
    ("capabilities", "names"),
    [
        (Capabilities(), ["none", "ngram", "ngram:exact=on"]),
        (Capabilities(("dflash",)), ["none", "ddtree", "ddtree:exact=on", "ngram"]),
        (Capabilities(("dflash",), trees=False), ["none", "dflash", "dflash:exact=on", "ngram"]),
    ],
)
def test_auto_goes_by_the_name_of_what_it_is_with_the_pair(capabilities, names):
    settled = settle_all(methods("auto,auto:exact=on,ngram"), capabilities)
    assert list(settled) == names
    assert [config.method for config in settled.values()] == [n.partition(":")[0] for n in names]
    chosen = methods("dflash:4,ddtree:budget=16,d2sd:8:growth=paper,resample")
    assert settle_all(chosen, Capabilities(("dflash",) * 2)) == chosen
