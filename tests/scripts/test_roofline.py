"""The roofline: its arithmetic by hand, the published speeds it was fitted to, and its document."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
import roofline
import roofline_plots
import roofline_products

from kernels_metal import factory, gpu
from kernels_metal.catalog import CATALOG
from kernels_metal.emulator import emulated
from kernels_metal.mac import report

README = Path(__file__).parents[2] / "README.md"
DOCUMENT = README.parent / "docs" / "roofline.md"
TRAFFIC = roofline.Traffic.read()


def test_a_plain_pass_is_its_bytes_over_the_bandwidth_and_a_time_per_layer():
    target = roofline.Target("by hand", 2, 10, 20, 4, 2, 5, 100)
    weights = 2 * (2 * 10 * (4 + 2) * 5 + 3 * 10 * 20) + 100 * 10
    keys = 2 * 2 * (2 * 2 * 5) * (roofline.CONTEXT + 1)
    expected = (2 * weights + keys + 2 * 2 * 100) / (50e9 * roofline_products.BANDWIDTH_SHARE)
    machine = roofline.Machine("M1 by hand", 50, 1, True)
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


def test_products_that_others_measured_are_met():
    ratios = [float(row[-1]) for row in roofline_products.product_rows()]
    assert len(ratios) > 12 and min(ratios) > 0.85 and max(ratios) < 1.2


@pytest.mark.parametrize("generation", [1, 2, 3, 4, 5])
def test_the_lower_of_stock_and_kernel_is_predicted_and_a_kernel_only_where_there_is_one(
    monkeypatch, generation
):
    monkeypatch.setattr(gpu, "gpu_family", lambda: f"applegpu_g{generation + 12}s")
    monkeypatch.setattr(gpu, "executor", lambda: factory.metal)
    assert roofline_products.KERNEL_ROWS[generation] == gpu.few_rows()
    machine = roofline.MACHINES[f"M{generation} Max"]
    taken = []
    for rows in range(2, 65):
        mine = roofline_products.kernel(machine, rows)
        both = [roofline_products.stock(machine, rows, 4), *([mine] if mine else [])]
        least = min(each.seconds(machine, 1e9, 4) for each in both)
        found = roofline_products.fastest(machine, 1e9, 4, rows)
        assert found.seconds(machine, 1e9, 4) == least
        assert found.is_stock or rows <= gpu.few_rows()
        taken += [] if found.is_stock else [rows]
    assert {4, 8, 16, 24} <= {*taken} if generation < 5 else not taken


def test_mlx_multiplies_as_its_source_says():
    def adds(name, rows, bits=4):
        found = roofline_products.stock(roofline.MACHINES[name], rows, bits)
        return found.reads, found.adds

    assert [adds("M1 Max", n)[0] for n in (1, 2, 5, 6, 32, 33)] == [1, 2, 5, 1, 1, 2]
    assert [adds("M2 Ultra", n)[0] for n in (12, 13)] == [12, 1]
    assert [adds("M4 Pro", n)[0] for n in (5, 6, 10, 11, 12, 13)] == [1, 2, 2, 3, 3, 1]
    assert adds("M4 Pro", 13) == adds("M4 Pro", 32)  # all rows of a tile are paid
    assert adds("M1", 2, 16) == adds("M1", 32, 16) and adds("M3", 2, 16) < adds("M3", 3, 16)


def test_a_report_from_a_mac_predicts_by_the_same_shares():
    shares = {roofline_products.FEW_ROWS: roofline_products.SCALAR_SHARE}
    assert {**shares, **roofline_products.MATRIX_SHARES} == report.SHARES
    assert roofline.MACHINES["M4"].stock.tiled == report.TILED


def test_the_readme_promises_what_is_predicted():
    text = " ".join(README.read_text("utf-8").split())
    four, eight = (roofline.gains(bits, TRAFFIC) for bits in (4, 8))
    assert f"{four[0]:.1f} to {four[1]:.1f} times for 4-bit targets" in text
    assert f"{eight[0]:.1f} to {eight[1]:.1f} times for 8-bit ones" in text


def test_the_document_begins_with_what_is_predicted():
    text = " ".join(DOCUMENT.read_text("utf-8").split())
    target = roofline.TARGETS["Qwen3-8B"]
    old = [machine for machine in roofline.MACHINES.values() if machine.generation < 5]

    def span(values):
        return f"{min(values):.1f} to {max(values):.1f}"

    def of_block(rows):
        method = roofline.chain(rows)
        return span([roofline.speedup(machine, target, 4, method, TRAFFIC) for machine in old])

    def passes(rows):
        return [roofline.pass_time(machine, target, 4, rows, TRAFFIC).seconds for machine in old]

    assert f"blocks of 8, and {of_block(8)} times plain" in text
    assert f"gain less** ({of_block(16)})" in text
    costs = [many / one for many, one in zip(passes(8), passes(1), strict=True)]
    assert f"8 rows cost {span(costs)} times one row" in text
    machine = roofline.MACHINES["M4 Pro"]
    one, eight, sixteen = (
        roofline_products.fastest(machine, 1e9, 4, rows).seconds(machine, 1e9, 4)
        for rows in (1, 8, 16)
    )
    assert f"products say {eight / one:.2f} and {sixteen / one:.2f}" in text
    assert f"({span(roofline.gains(8, TRAFFIC))} times with the best block)" in text


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
