"""The roofline: its arithmetic by hand, the published speeds it was fitted to, and its document."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from kernels_metal.catalog import CATALOG
from kernels_metal.emulator import emulated

ROOT = Path(__file__).parents[2]
BILLIONS = {
    "SmolLM2-135M": 0.1345,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.77,
    "Qwen3-32B": 32.76,
}


@pytest.fixture(scope="module")
def scripts():
    """The folder from which the script and its neighbours import each other."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def roofline(scripts):
    return importlib.import_module("roofline")


@pytest.fixture(scope="module")
def data(scripts):
    return importlib.import_module("roofline_data")


@pytest.fixture(scope="module")
def traffic(roofline):
    return roofline.Traffic.read()


def test_targets_have_as_many_parameters_as_published(data):
    assert data.TARGETS.keys() == BILLIONS.keys()
    for name, billions in BILLIONS.items():
        assert data.TARGETS[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_weights_take_their_bits_and_a_scale_and_a_bias_for_each_group(roofline):
    assert [roofline.weight_bytes(64, bits) for bits in (4, 8, 16)] == [36, 68, 128]


def test_a_plain_pass_is_its_bytes_over_the_bandwidth_and_a_time_per_layer(roofline, data):
    target = data.Target("by hand", 2, 10, 20, 4, 2, 5, 100)
    weights = 2 * (2 * 10 * (4 + 2) * 5 + 3 * 10 * 20) + 100 * 10
    keys = 2 * 2 * (2 * 2 * 5) * (roofline.CONTEXT + 1)
    expected = (2 * weights + keys + 2 * 2 * 100) / (50e9 * roofline.BANDWIDTH_SHARE)
    machine = data.Machine("by hand", 50, 1, True)
    found = roofline.pass_time(machine, target, 16, 1, roofline.Traffic({}, {}))
    assert found.memory == pytest.approx(expected)
    assert found.compute == 0
    assert found.seconds == pytest.approx(expected + 2 * roofline.LAYER_SECONDS)


def test_instructions_of_a_weight_follow_the_columns_that_a_simd_group_holds(roofline):
    assert roofline.instructions(8, 4) == 4 + 8 * (1 + 1.25 / 4)
    assert roofline.instructions(9, 8) == 4 + 9 * (1 + 1.25 / 2)
    assert roofline.instructions(32, 4) == 4 + 32 * 2.25
    assert roofline.instructions(33, 4) == 4 + 33
    assert roofline.instructions(16, 16) == 16


def test_passes_grow_with_rows_and_shrink_with_the_machine(roofline, data, traffic):
    target, machine = data.TARGETS["Qwen3-8B"], data.MACHINES["M4 Pro"]
    for bits in roofline.BITS:
        times = [
            roofline.pass_time(machine, target, bits, rows, traffic).seconds
            for rows in range(1, 33)
        ]
        assert times == sorted(times)
    slow = roofline.pass_time(machine, target, 4, 16, traffic)
    twice = replace(machine, tflops=2 * machine.tflops)
    fast = roofline.pass_time(twice, target, 4, 16, traffic)
    assert slow.compute == pytest.approx(2 * fast.compute)
    assert slow.memory == fast.memory
    both = slow + fast
    assert both.seconds == pytest.approx(slow.seconds + fast.seconds)


def test_chain_acceptance_returns_what_it_was_given_and_grows(roofline):
    assert roofline.chain_acceptance(5.31, 16, 16) == pytest.approx(5.31)
    found = [roofline.chain_acceptance(5.31, 16, block) for block in (1, 2, 4, 8, 16)]
    assert found[0] == 1
    assert found == sorted(found)


def test_chain_acceptance_agrees_with_two_published_block_sizes_of_one_pair(roofline):
    """z-lab/dflash issue 151: 4.30 with blocks of 16, 2.95 with blocks of 4."""
    assert roofline.chain_acceptance(4.30, 16, 4) == pytest.approx(2.95, rel=0.05)


def test_a_tree_that_accepts_its_break_even_is_as_fast_as_plain_decoding(roofline, data, traffic):
    machine, target = data.MACHINES["M1 Max"], data.TARGETS["Qwen3-4B"]
    needed = roofline.break_even(machine, target, 8, 32, traffic)
    tree = roofline.Method("tree", 32, (16,), needed)
    assert roofline.speedup(machine, target, 8, tree, traffic) == pytest.approx(1)


def test_plain_speeds_are_within_a_tenth_of_the_published_ones(roofline, data, traffic):
    for known in data.PLAIN:
        machine = data.MACHINES[known.machine]
        ours = 1 / roofline.pass_time(machine, known.target, known.bits, 1, traffic).seconds
        assert ours == pytest.approx(known.speed, rel=0.1), known


def test_stored_traffic_is_what_the_emulator_counts(roofline, data, traffic):
    target = data.TARGETS["SmolLM2-135M"]
    shape = {"heads": target.heads, "kv_heads": target.kv_heads, "dim": target.dim}
    with emulated() as run:
        mx.eval(CATALOG["cascade_attention"].run(rows=8, prefix=roofline.CONTEXT, **shape))
    (split,), (merge,) = run.of("cascade_attention"), run.of("cascade_merge")
    keys = split.buffers["keys"].fetched + split.buffers["values"].fetched
    written = split.buffers["partial"].written + split.buffers["sums"].written
    fetched = merge.buffers["partial"].fetched + merge.buffers["sums"].fetched
    assert traffic.attention[target.name][8] == (keys, written + fetched)
    assert keys == 2 * target.kv_heads * target.dim * 2 * (roofline.CONTEXT + 8)
    assert set(traffic.weights[4].values()) == set(traffic.weights[8].values()) == {1.0}


def test_rows_between_the_measured_ones_are_interpolated(roofline, data):
    counted = roofline.Traffic({}, {"t": {4: (100, 10), 8: (200, 50)}})
    target = replace(data.TARGETS["Qwen3-8B"], name="t")
    assert counted.keys_and_splits(target, 4) == (100, 10)
    assert counted.keys_and_splits(target, 7) == (175, 40)
    assert counted.keys_and_splits(target.drafter, 8) == (200, 50)


def test_the_document_has_the_tables_that_the_script_prints(roofline, traffic):
    lines = (ROOT / "docs" / "roofline.md").read_text(encoding="utf-8").splitlines()
    printed = [line for line in roofline.report(traffic).splitlines() if line.startswith("|")]
    assert len(printed) > 60
    assert [line for line in printed if line not in lines] == []
    kept = [line for line in lines if line.startswith("|")]
    assert [line for line in kept if line not in printed] == []


def test_pictures_are_drawn_small_and_the_document_shows_them(scripts, traffic, tmp_path):
    importlib.import_module("roofline_plots").draw(traffic, tmp_path)
    text = (ROOT / "docs" / "roofline.md").read_text(encoding="utf-8")
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 3
    for picture in drawn:
        kept = ROOT / "docs" / picture.name
        assert f"({picture.name})" in text
        assert 10_000 < picture.stat().st_size < 200_000
        assert 10_000 < kept.stat().st_size < 200_000
