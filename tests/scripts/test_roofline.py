"""The roofline: its arithmetic by hand, the published speeds it was fitted to, and its document."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
import roofline
import roofline_plots

from kernels_metal.catalog import CATALOG
from kernels_metal.emulator import emulated

DOCUMENT = Path(__file__).parents[2] / "docs" / "roofline.md"
TRAFFIC = roofline.Traffic.read()


def test_a_plain_pass_is_its_bytes_over_the_bandwidth_and_a_time_per_layer():
    target = roofline.Target("by hand", 2, 10, 20, 4, 2, 5, 100)
    weights = 2 * (2 * 10 * (4 + 2) * 5 + 3 * 10 * 20) + 100 * 10
    keys = 2 * 2 * (2 * 2 * 5) * (roofline.CONTEXT + 1)
    expected = (2 * weights + keys + 2 * 2 * 100) / (50e9 * roofline.BANDWIDTH_SHARE)
    machine = roofline.Machine("by hand", 50, 1, True)
    found = roofline.pass_time(machine, target, 16, 1, roofline.Traffic({}, {}))
    assert found.memory == pytest.approx(expected)
    assert found.compute == 0
    assert found.seconds == pytest.approx(expected + 2 * roofline.LAYER_SECONDS)


def test_published_plain_speeds_and_acceptance_are_met():
    for known in roofline.PLAIN:
        machine = roofline.MACHINES[known.machine]
        ours = 1 / roofline.pass_time(machine, known.target, known.bits, 1, TRAFFIC).seconds
        assert ours == pytest.approx(known.speed, rel=0.1), known
    # z-lab/dflash issue 151: 4.30 with blocks of 16, 2.95 with blocks of 4
    assert roofline.chain_acceptance(4.30, 16, 4) == pytest.approx(2.95, rel=0.05)


def test_stored_traffic_is_what_the_emulator_counts():
    target = roofline.TARGETS["SmolLM2-135M"]
    shape = {"heads": target.heads, "kv_heads": target.kv_heads, "dim": target.dim}
    with emulated() as run:
        mx.eval(CATALOG["cascade_attention"].run(rows=8, prefix=roofline.CONTEXT, **shape))
    (split,), (merge,) = run.of("cascade_attention"), run.of("cascade_merge")
    keys = split.buffers["keys"].fetched + split.buffers["values"].fetched
    written = split.buffers["result"].written + split.buffers["sums"].written
    fetched = merge.buffers["partial"].fetched + merge.buffers["sums"].fetched
    assert TRAFFIC.attention[target.name][8] == (keys, written + fetched)
    assert keys == 2 * target.kv_heads * target.dim * 2 * (roofline.CONTEXT + 8)


def test_the_document_has_the_tables_that_the_script_prints():
    kept = [li for li in DOCUMENT.read_text("utf-8").splitlines() if li.startswith("|")]
    printed = [li for li in roofline.report(TRAFFIC).splitlines() if li.startswith("|")]
    assert len(printed) > 60 and set(kept) == set(printed)


def test_the_pictures_of_the_document_are_drawn(tmp_path):
    roofline_plots.draw(TRAFFIC, tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert len(drawn) == 3
    assert all(f"({name})" in DOCUMENT.read_text("utf-8") for name in drawn)
