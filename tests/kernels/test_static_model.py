"""What counts say of the kernels' speed: geometries and inner loops that would waste a GPU are red.

The limits are what the kernels reach today, rounded down; faults that were once there, or that a
change could bring, are planted and have to fall below them.
"""

import shutil

import mlx.core as mx
import pytest

from kernels_metal import cascade_attention as attention
from kernels_metal import verify_qmm as products
from kernels_metal.cascade_attention import CASCADE_ATTENTION
from kernels_metal.emulator import emulated
from kernels_metal.factory import SOURCE, Launch
from kernels_metal.verify_qmm import Packing, Product
from support.emulator_tiny import RAMP, run
from support.kernels import arguments
from support.packings import KINDS, product
from support.static_model import ACCESS, busy_share, share_of_peak

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
CORES = {"M4": 10, "M4 Pro": 20, "M4 Max": 40, "M3 Ultra": 80}

# Matrices that decide, by K, columns of y and whether gated: the least of what 10 to 40 cores, and
# 80, are kept busy. Columns of the narrow ones are too few for 80 cores.
DECISIVE = {
    "27B gate": ((5120, 17408, 0), 0.95, 0.95),
    "27B gate and up": ((5120, 17408, 1), 0.95, 0.95),
    "27B down": ((17408, 5120, 0), 0.95, 0.6),
    "8B gate and up": ((4096, 12288, 1), 0.95, 0.95),
    "8B q, k and v": ((4096, 6144, 0), 0.9, 0.6),
    "8B down": ((12288, 4096, 0), 0.75, 0.4),
    "4B gate and up": ((2560, 9728, 1), 0.9, 0.9),
    "4B down": ((9728, 2560, 0), 0.6, 0.3),
}


def product_launch(depth: int, columns: int, gated: int) -> Launch:
    held = columns * (1 + gated)
    words, scales = mx.zeros((held, depth // 8), mx.uint32), mx.zeros((held, depth // 64))
    matrix = Product(words, scales, scales, Packing(4, 64, gated=bool(gated)))
    return matrix._plan(mx.zeros((8, depth)), "matrix")[0].plan


@pytest.mark.parametrize(("shape", "least", "ultra"), DECISIVE.values(), ids=DECISIVE)
def test_products_keep_the_cores_busy(shape, least, ultra):
    launch = product_launch(*shape)
    assert min(busy_share(launch, CORES[chip]) for chip in ("M4", "M4 Pro", "M4 Max")) >= least
    assert busy_share(launch, CORES["M3 Ultra"]) >= ultra


def test_sums_that_are_not_shared_would_leave_half_of_a_large_gpu_idle(monkeypatch):
    monkeypatch.setattr(products, "_parts", lambda *_: 1)
    launch = product_launch(5120, 17408, 0)
    assert [busy_share(launch, CORES[chip]) < 0.5 for chip in ("M4 Max", "M3 Ultra")] == [True] * 2


# By rows: the least share of the arithmetic peak that the few-row product can reach
LEAST = {8: 0.44, 16: 0.53, 24: 0.54, 32: 0.56}
# At 8 rows, by how weights are packed; those that are not need no unpacking
LEAST_OF = {"4-32": 0.42, "6-64": 0.43, "8-32": 0.41, "mxfp4": 0.45, "nvfp4": 0.45, "mxfp8": 0.44}
LEAST_OF["none"] = 0.63
FOUR_BITS = Packing(4, 64)


def product_share(rows: int, packing: Packing = FOUR_BITS) -> float:
    given = product(rows, 512, 1024, packing, mx.float16)
    with emulated() as run:
        products.verify_qmm(*given, "matrix")
    unpacked = 0 if packing.mode == "none" else 512 * 1024
    return share_of_peak(run.counters[0], rows * 512 * 1024, unpacked)


@pytest.mark.parametrize(
    ("packing", "least"), [*zip(KINDS, LEAST_OF.values(), strict=True)], ids=str
)
def test_no_packing_costs_more_than_integers_and_one_tile_across_would(monkeypatch, packing, least):
    assert product_share(8, packing) >= least
    monkeypatch.setattr(products, "WIDE", 10**9)
    assert product_share(8, packing) < least


@pytest.mark.parametrize(("rows", "least"), LEAST.items())
def test_products_spend_half_of_their_cycles_on_multiplying_and_one_tile_across_would_not(
    monkeypatch, rows, least
):
    assert least <= product_share(rows) <= 0.7
    monkeypatch.setattr(products, "WIDE", 10**9)
    assert product_share(rows) < least


def attention_launch(rows: int, keys: int, kv_heads: int, width: int) -> Launch:
    """Of attention; rows: of each key/value head."""
    found = attention.layout(rows, keys, kv_heads, width, 2)
    threads = found.groups * found.halves * 32
    grid = (kv_heads * threads, found.splits, found.sets)
    return Launch(grid, (threads, 1, 1), (), ())


@pytest.mark.parametrize(
    "shape", [(32, 4096, 8, 128), (128, 4096, 8, 128), (48, 4096, 4, 256), (96, 4096, 4, 256)]
)
def test_attention_keeps_the_cores_busy_and_fewer_splits_would_not(monkeypatch, shape):
    assert busy_share(attention_launch(*shape), CORES["M4 Max"]) >= 0.85
    monkeypatch.setattr(attention, "SHARE", 16)
    assert busy_share(attention_launch(*shape), CORES["M4 Max"]) < 0.6


@pytest.mark.parametrize("dim", [128, 256])
def test_attention_spends_two_thirds_of_its_cycles_on_multiplying(dim):
    """5 percent at most go into the copy to threadgroup memory, by which all rows share keys."""
    sizes = {"rows": 8, "prefix": 1000, "heads": 4, "kv_heads": 1, "dim": dim}
    given = arguments(CASCADE_ATTENTION, mx.float16, **sizes)
    with emulated() as run:
        CASCADE_ATTENTION.kernel(*given)
    (counters,) = run.of("cascade_attention")
    whole = 2 * 8 * 4 * dim * 1008
    share = share_of_peak(counters, whole, 0)
    assert share >= 0.65
    staged = given[1].nbytes * 2 // 8  # loads of four numbers, of keys and values; as many stores
    assert 2 * staged * ACCESS <= 0.05 * whole / share


# Banks of threadgroup memory


@pytest.mark.parametrize(("step", "cycles"), [(1, 1), (2, 2), (3, 1), (4, 4), (32, 32), (33, 1)])
def test_words_of_one_bank_come_one_after_the_other_and_one_word_comes_to_all(step, cycles):
    """A store, a load of the same, and a load of one word by all lanes."""
    body = f"threadgroup float s[{32 * step}];\ns[i * {step}] = a[i];\n{BARRIER}"
    _, counters = run(f"{body}o[i] = s[i * {step}] + s[0];", RAMP)
    assert counters.threadgroup_cycles == 2 * cycles + 1


def test_lanes_that_part_are_counted_apart():
    body = f"threadgroup float s[96];\ns[i] = s[i + 32] = s[i + 64] = a[i];\n{BARRIER}"
    branches = "if (i < 8) { o[i] = s[2 * i]; } else { o[i] = s[i + 32] + s[2 * i]; }"
    _, counters = run(body + branches, RAMP)
    assert counters.threadgroup_cycles == 3 + 1 + 1 + 2


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_of_values_lie_in_different_banks(dim, dtype, tmp_path):
    copy = shutil.copytree(SOURCE, tmp_path / "source")
    file = copy / "cascade_attention.metal"
    file.write_text(file.read_text().replace("? D + 12 :", "? D + 8 :"))
    sizes = {"rows": 8, "prefix": 200, "heads": 2, "kv_heads": 1, "dim": dim}
    cycles = []
    for folder in (None, copy):
        with emulated(folder) as counted:
            CASCADE_ATTENTION.kernel(*arguments(CASCADE_ATTENTION, dtype, **sizes))
        cycles.append(counted.of("cascade_attention")[0].threadgroup_cycles)
    assert cycles[0] <= 0.92 * cycles[1]
