"""Names of methods and sweeps become settings."""

from __future__ import annotations

import pytest

from dflash_mlx.benchmark.selection import Sweep, name_blocks, read_methods, settle_all
from dflash_mlx.core.config import DecodeConfig
from dflash_mlx.core.errors import DFlashError
from dflash_mlx.engine.pair import Advice, Means


def methods(names: str, **settings: object) -> dict[str, DecodeConfig]:
    return read_methods(names, DecodeConfig(**settings))


def test_settings_behind_a_name_replace_those_of_the_command_line():
    found = methods("dflash:4,ddtree:budget=16,d2sd:6:growth=paper:branches=2", budget=9)
    assert list(found) == ["none", "dflash:4", "ddtree:budget=16", "d2sd:6:growth=paper:branches=2"]
    assert found["dflash:4"].block_size == 4
    assert (found["ddtree:budget=16"].budget, found["dflash:4"].budget) == (16, 9)
    last = found["d2sd:6:growth=paper:branches=2"]
    assert (last.block_size, last.growth, last.branches) == (6, "paper", 2)
    assert methods("ddtree:budget=auto", budget=9)["ddtree:budget=auto"].budget is None


def test_switches_are_on_or_off():
    found = methods("d2sd:lookup=off,d2sd:lookup=on")
    assert [config.lookup for config in found.values()] == [True, False, True]
    with pytest.raises(DFlashError, match="lookup in 'd2sd:lookup=no' is 'no'"):
        methods("d2sd:lookup=no")


def expand(sweep: str, names: str, largest: int = 8) -> list[str]:
    return list(Sweep.read(sweep).expand(methods(names), largest)[0])


def test_a_sweep_runs_every_value_of_the_methods_that_have_the_setting():
    plan, lines = Sweep.read("budget=auto,8,16").expand(methods("dflash,ddtree,d2sd:4"), 8)
    assert lines == {
        name: {value: f"{name}:budget={value}" for value in ("auto", "8", "16")}
        for name in ("ddtree", "d2sd:4")
    }
    swept = [run for runs in lines.values() for run in runs.values()]
    assert list(plan) == ["none", "dflash", *swept]
    assert [plan[f"d2sd:4:budget={v}"].budget for v in ("auto", "8", "16")] == [None, 8, 16]
    assert plan["d2sd:4:budget=8"].block_size == 4


def test_a_block_sweep_stops_at_the_drafters_size_unless_values_are_given():
    assert expand("block", "dflash", 6) == ["none", *(f"dflash:block={n}" for n in (2, 3, 4, 6))]
    assert expand("block=4,8", "dflash", 6) == ["none", "dflash:block=4", "dflash:block=8"]
    plan, _ = Sweep.read("block=4").expand(methods("dflash"), 8)
    assert plan["dflash:block=4"].block_size == 4


def test_methods_with_a_value_of_their_own_are_run_as_they_are():
    assert expand("block=4,8", "dflash:6,ddtree:budget=4") == [
        "none",
        "dflash:6",
        "ddtree:budget=4:block=4",
        "ddtree:budget=4:block=8",
    ]
    assert expand("budget=4,8", "d2sd:growth=paper,ddtree")[:2] == ["none", "d2sd:growth=paper"]


def test_branches_are_swept_for_both_growths_and_the_control():
    names = "dflash,d2sd,d2sd:growth=paper,resample"
    _, lines = Sweep.read("branches=2").expand(methods(names), 8)
    assert list(lines) == ["d2sd", "d2sd:growth=paper", "resample"]


@pytest.mark.parametrize("setting", ["block", "branches", "budget"])
def test_every_sweep_has_values_of_its_own_that_are_allowed(setting):
    plan, lines = Sweep.read(setting).expand(methods("d2sd"), 16)
    assert len(lines["d2sd"]) >= 5
    assert set(lines["d2sd"].values()) <= set(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed", "the sweep is over 'speed'"),
        ("", "the sweep is over ''"),
        ("budget=", "budget in 'budget=' is ''"),
        ("budget=4,many", "'many'"),
        ("block=auto", "the block size in 'block=auto' is 'auto'"),
        ("budget=1", "budget is 1"),
        ("branches=0", "branches is 0"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(DFlashError, match=message) as failure:
        Sweep.read(text).expand(methods("d2sd"), 8)
    assert failure.value.next_step


@pytest.mark.parametrize(("setting", "names"), [("budget", "dflash"), ("branches", "ddtree")])
def test_a_sweep_without_a_method_that_has_the_setting_is_refused(setting, names):
    with pytest.raises(DFlashError, match=f"no method has a {setting} to sweep"):
        Sweep.read(setting).expand(methods(names), 8)


@pytest.mark.parametrize(
    ("means", "names"),
    [
        (Means(0), ["none", "ngram", "ngram:exact=on"]),
        (Means(1), ["none", "ddtree", "ddtree:exact=on", "ngram"]),
        (Means(1, trees=False), ["none", "dflash", "dflash:exact=on", "ngram"]),
    ],
)
def test_auto_goes_by_the_name_of_what_it_is_with_the_pair(means, names):
    settled = settle_all(methods("auto,auto:exact=on,ngram"), means)
    assert list(settled) == names
    assert {name: config.method for name, config in settled.items()} == {
        name: name.partition(":")[0] for name in names
    }


def test_methods_that_were_chosen_keep_their_names_and_settings():
    chosen = methods("dflash:4,ddtree:budget=16,d2sd:8:growth=paper,resample")
    assert settle_all(chosen, Means(2)) == chosen


@pytest.mark.parametrize("sweep", ["block=4,8", "branches=2,4", "budget=4,8"])
def test_auto_may_have_any_setting_until_it_is_settled(sweep):
    setting, _, values = sweep.partition("=")
    expected = ["none", *(f"auto:{setting}={value}" for value in values.split(","))]
    assert expand(sweep, "auto") == expected
    settled = settle_all(methods("auto"), Means(1, trees=False))
    if setting != "block":
        with pytest.raises(DFlashError, match=f"no method has a {setting} to sweep"):
            Sweep.read(sweep).expand(settled, 8)


def advised(names: str, **settings: object) -> dict[str, int | None]:
    """Names and blocks with a pair of which a block of 5 is advised."""
    asked = DecodeConfig(**settings)
    settled = settle_all(read_methods(names, asked), Means(1, False, Advice("auto", 5)))
    return {name: c.block_size for name, c in name_blocks(settled, asked).items()}


def test_the_block_that_is_advised_is_in_the_name_of_its_run():
    found = advised("auto,dflash,dflash:4,ngram")
    assert found == {"none": None, "dflash:5": 5, "dflash:4": 4, "ngram": None}
    assert advised("dflash:exact=on") == {"none": None, "dflash:exact=on:5": 5}
    assert advised("dflash", block_size=5) == {"none": None, "dflash": 5}
