"""The cascade_attention kernels in the emulator against their reference."""

from pathlib import Path

import mlx.core as mx
import pytest

from kernels_metal.cascade_attention import cascade_attention, cascade_attention_reference
from kernels_metal.emulator import emulated
from kernels_metal.factory import Kernel, Launch, executing, launch
from support import kernel_cases as cases
from support.kernel_cases import Attention

SHAPES = [
    # One row, and prefixes around the tiles of 8, 16 and 32 keys
    Attention(64, 1, 1, 1, 0),
    Attention(64, 2, 1, 1, 1, mask="all"),
    Attention(80, 2, 2, 1, 7),
    Attention(96, 3, 1, 1, 8, sinks=True),
    Attention(128, 4, 2, 1, 15),
    Attention(256, 2, 1, 1, 16),
    Attention(64, 2, 2, 2, 31, window=True),
    Attention(80, 2, 1, 3, 32),
    Attention(96, 4, 2, 5, 33, mask="causal"),
    Attention(128, 3, 3, 7, 63, mask="causal", sinks=True),
    Attention(256, 4, 4, 8, 20, mask="all"),
    # Blocks and trees behind longer prefixes: one split, then several
    Attention(64, 4, 1, 9, 64, mask="causal", start=3, slack=7),
    Attention(80, 4, 2, 15, 65, mask="all", sinks=True),
    Attention(96, 2, 2, 16, 100, transposed=True),
    Attention(128, 2, 1, 16, 127, window=True),
    Attention(256, 2, 1, 12, 33, mask="causal", window=True),
    Attention(64, 8, 2, 7, 128, start=1),
    Attention(80, 1, 1, 17, 129, sinks=True, window=True),
    Attention(96, 6, 3, 10, 150, mask="branches"),
    Attention(128, 8, 1, 5, 200, slack=40, transposed=True),
    Attention(256, 1, 1, 24, 70, mask="branches"),
    # Local keys that need a second and a third word of bits
    Attention(64, 2, 1, 31, 40),
    Attention(64, 2, 1, 32, 30),
    Attention(80, 2, 2, 33, 20),
    Attention(96, 1, 1, 48, 17, mask="branches", window=True),
    Attention(128, 1, 1, 64, 10, mask="causal"),
    Attention(64, 1, 1, 8, 50, columns=65, mask="causal"),
    Attention(80, 2, 1, 4, 9, columns=96, mask="branches"),
    Attention(96, 2, 1, 12, 5, columns=3, mask="all"),
    # More query rows than the registers of a threadgroup hold: 64, with a head dim of 256 32
    Attention(64, 1, 1, 65, 70),
    Attention(64, 8, 1, 9, 64, window=True),
    Attention(80, 4, 2, 33, 33, mask="causal"),
    Attention(96, 1, 1, 96, 40, sinks=True),
    Attention(128, 2, 1, 63, 16, mask="branches"),
    Attention(256, 1, 1, 33, 9, mask="causal"),
    Attention(256, 4, 1, 9, 17, sinks=True, window=True),
    Attention(64, 2, 2, 95, 1, mask="all", transposed=True),
    # Long prefixes, nine or more query heads
    Attention(64, 9, 3, 2, 300, mask="causal", sinks=True),
    Attention(128, 12, 12, 1, 77, sinks=True),
    Attention(80, 3, 1, 4, 1000, slack=24),
    Attention(96, 1, 1, 3, 2047, window=True),
    Attention(128, 1, 1, 2, 4095),
    Attention(64, 2, 1, 2, 5000, mask="causal", start=120, slack=136),
]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cascade_attention_equals_its_reference(shape, dtype):
    queries, keys, values, seen, scale, sinks = shape.arguments(dtype)
    with emulated():
        result = cascade_attention(queries, keys, values, seen, scale, sinks)
    wide = [None if a is None else a.astype(mx.float32) for a in (queries, keys, values, sinks)]
    expected = cascade_attention_reference(*wide[:3], seen, scale, wide[3])
    cases.assert_close(result, expected, dtype)


def test_the_shapes_lie_on_both_sides_of_every_branch():
    assert len(SHAPES) >= 40
    assert {shape.dim for shape in SHAPES} == {64, 80, 96, 128, 256}
    assert {1, 96} <= {shape.rows for shape in SHAPES}
    assert {0, 5000} <= {shape.prefix for shape in SHAPES}
    for either in ("window", "sinks", "transposed"):
        assert {getattr(shape, either) for shape in SHAPES} == {False, True}
    splits, sets, words = set(), set(), set()
    for shape in SHAPES:
        queries, keys, values, seen, scale, _ = shape.arguments(mx.float16)
        rows = shape.rows * shape.heads // shape.kv_heads
        sets.add(-(-rows // (64 if shape.dim < 256 else 32)))
        words.add(seen.bits.shape[1] - 1)
        plans = []

        def record(kernel, inputs, plan, plans=plans):
            plans.append(plan)
            return [mx.zeros(shape) for shape in plan.output_shapes]

        with executing(record):
            cascade_attention(queries, keys, values, seen, scale)
        splits.add(plans[0].grid[1])
    assert sets == {1, 2}  # rows in one go, and in two
    assert words == {1, 2, 3}
    assert 1 in splits and max(splits) > 32  # more than the lanes of the SIMD-group that joins them


@pytest.mark.parametrize("rows", [1, 16, 64, 65, 96])
def test_the_prefix_is_read_once_for_all_rows(rows):
    shape = Attention(64, 4, 2, rows, 300, mask="causal", slack=9)
    queries, keys, values, seen, scale, _ = shape.arguments(mx.float16)
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, scale)
    used = keys[:, :, : seen.keys].nbytes
    for name in ("keys", "values"):
        assert used <= cases.bytes_read(run, "cascade_attention", name) <= 1.02 * used


def test_one_query_row_per_threadgroup_reads_the_prefix_once_for_each_row():
    """The control: the same result, with as many times the traffic as query rows share a head."""
    shape = Attention(64, 4, 2, 6, 100, mask="all")
    queries, keys, values, seen, scale, _ = shape.arguments(mx.float16)
    kernel = Kernel(
        "one_row_attention",
        inputs=("queries", "keys", "values", "dense", "scale"),
        outputs=("y",),
        folder=Path(__file__).parent,
    )
    plan = Launch(
        grid=(32, 4 * 6, 1),
        threadgroup=(32, 1, 1),
        output_shapes=(queries.shape,),
        output_dtypes=(mx.float16,),
        template=(("T", mx.float16), ("D", 64)),
    )
    dense = mx.full((6, seen.keys), True)
    with emulated() as run:
        stock = launch(kernel, [queries, keys, values, dense, mx.array([scale])], plan)[0]
        ours = cascade_attention(queries, keys, values, seen, scale)
    cases.assert_close(stock, cases.attend(queries, keys, values, seen, scale), mx.float16)
    assert mx.allclose(stock, ours, atol=2e-3)
    read = [
        cases.bytes_read(run, name, "keys") for name in ("one_row_attention", "cascade_attention")
    ]
    assert read == [6 * 2 * keys.nbytes, keys.nbytes]


def test_keys_that_no_window_reaches_are_not_read():
    shape = Attention(64, 1, 1, 4, 1000, window=True)
    queries, keys, values, seen, scale, _ = shape.arguments(mx.float16)
    assert min(seen.starts) > 0
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, scale)
    used = keys[:, :, min(seen.starts) : seen.keys].nbytes
    assert cases.bytes_read(run, "cascade_attention", "keys") == used


def test_hidden_keys_do_not_matter_however_large_their_scores():
    shape = Attention(64, 2, 1, 6, 40, columns=12)
    queries, keys, values, seen, scale, _ = shape.arguments(mx.float32)
    hidden = ~mx.any(seen.mask, axis=0)
    assert hidden.tolist() == [False] * 46 + [True] * 6  # from all rows
    keys = mx.where(hidden[:, None], 100 * queries[:, :1, :1], keys)
    with emulated():
        result = cascade_attention(queries, keys, values, seen, scale)
    cases.assert_close(result, cases.attend(queries, keys, values, seen, scale))


def test_every_partial_result_is_written_once():
    queries, keys, values, seen, scale, _ = Attention(64, 2, 1, 9, 300).arguments(mx.float16)
    with emulated() as run:
        cascade_attention(queries, keys, values, seen, scale)
    partial = run.of("cascade_attention")[0].buffers["partial"]
    assert partial.written == partial.size
