"""The kernels of gated delta nets: what they make of a net's products, and the rule along trees."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.checks import FLOATS
from kernels_metal.delta_net import (
    DELTA_NET,
    Before,
    Mixer,
    Step,
    delta_net,
    delta_net_reference,
    orders,
    sources,
)
from kernels_metal.emulator import emulated
from support.kernels import arguments, assert_close, bytes_read, each_is_found, exact

CHAIN = range(-1, 11)
TREE = (-1, 0, 0, 1, 0, 3, 5, 4, 6, 8, 5, 2)
STAR = (-1, *[0] * 11)


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def convolved(qkv: np.ndarray, before: Before, mixer: Mixer, parents: Sequence[int]) -> np.ndarray:
    """Of each row's own path, [R, heads, D]."""
    weight, rows = exact(mixer.weight)[:, :, 0], []
    for row in range(len(parents)):
        path, at = [], row
        while at >= 0:
            path.insert(0, qkv[at])
            at = parents[at]
        last = np.stack([*exact(before.convolved)[0], *path])[-weight.shape[1] :]
        x = (last.T * weight).sum(1)
        rows.append(x * logistic(x))
    return np.stack(rows).reshape(len(rows), -1, mixer.dim)


def added(state: np.ndarray, key: np.ndarray, decay: np.ndarray, delta: np.ndarray) -> np.ndarray:
    key = np.repeat(key, len(decay) // len(key), axis=0)
    return state * decay[:, None, None] + key[:, None] * delta[..., None]


def expected(products, mixer: Mixer, before: Before, parents: Sequence[int]) -> list[np.ndarray]:
    """What Qwen3.5's net and the gated delta rule make, path by path, row by row in float64."""
    qkv, a, b = (exact(x)[0] for x in products)
    heads = convolved(qkv, before, mixer, parents)
    q, k, v = np.split(heads, [mixer.key_heads, 2 * mixer.key_heads], axis=1)
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    rates = np.exp(exact(mixer.rates)) * np.log1p(np.exp(a + exact(mixer.biases)))
    decays, begun = np.exp(-rates), exact(before.state)[0]
    if tape := before.tape:
        taped = [exact(x)[0] for x in tape[:3]]
        for row in tape.path:
            begun = added(begun, *(x[row] for x in taped))
    found, ys, deltas = [begun], [], []
    for row, parent in enumerate(parents):
        key, query = (np.repeat(x[row], v.shape[1] // x.shape[1], axis=0) for x in (k, q))
        held = np.einsum("hvk,hk->hv", found[parent + 1] * decays[row][:, None, None], key)
        deltas.append((v[row] - held) * logistic(b[row])[:, None])
        found.append(added(found[parent + 1], k[row], decays[row], deltas[-1]))
        ys.append(np.einsum("hvk,hk->hv", found[-1], query) / np.sqrt(mixer.dim))
    window = np.concatenate([exact(before.convolved)[0], qkv])
    return [np.stack(x)[None] for x in (ys, window, begun, k, decays, deltas)]


def parts(step: Step) -> list[mx.array]:
    return [*step[:3], *step.tape[:3]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parents", [CHAIN, TREE, STAR], ids=str)
@pytest.mark.parametrize("sizes", [{"taps": 2}, {"taped": 5}, {"taped": 4, "dim": 128}], ids=str)
def test_kernels_and_reference_do_what_the_net_does_along_every_path(sizes, parents, dtype):
    *given, before, _ = arguments(DELTA_NET, dtype, **{"rows": 12, "dim": 64, **sizes})
    if before.tape is not None:
        before = before._replace(tape=before.tape._replace(path=[0, 2]))
    given = *given, before, parents
    with emulated() as run:
        kernels = parts(delta_net(*given))
    assert [launch.kernel for launch in run.counters] == ["delta_inputs", "gated_delta"]
    assert bytes_read(run, "gated_delta", "state") == before.state.nbytes  # whatever branches
    assert run.counters[1].buffers["begun"].written == before.state.nbytes
    references = parts(delta_net_reference(*given))
    near = {4: 1e-4, 2: 0.1}[dtype.size]  # of numbers that were rounded on the way
    of = dtype, dtype, *[mx.float32] * 4
    for ours, stocks, right, kind in zip(kernels, references, expected(*given), of, strict=True):
        assert_close(ours, right, kind)
        assert np.abs(exact(stocks) - right).max() <= near * np.abs(right).max()


def test_rows_give_the_same_bits_however_many_are_passed_at_a_time():
    products, mixer, before, _ = arguments(DELTA_NET, rows=12, dim=64)
    found = []
    with emulated():
        for step in (12, 5, 1):
            ys, behind = [], before
            for at in range(0, 12, step):
                some = [x[:, at : at + step] for x in products]
                made = delta_net(some, mixer, behind, range(-1, some[0].shape[1] - 1))
                ys.append(made.y)
                behind = Before(made.window[:, -3:], made.begun, made.tape)
            last = [x[:, :1] for x in products]
            found.append([*ys, delta_net(last, mixer, behind, [-1]).begun])
    for *ys, state in found:
        assert mx.array_equal(mx.concatenate(ys, axis=1), found[0][0])
        assert mx.array_equal(state, found[0][1])


def test_a_walk_goes_back_to_the_first_state_where_a_branch_begins():
    chain = orders((4, 6), (-1, 0, 1)).tolist()
    assert chain == [2, 3, 4, 6, 0, 4, 8, *[0] * 25]  # two replayed, three rows, filled up
    done, again = 4 * 0 + 1, 2
    walk = [4 * 0, 4 * 1, 4 * 3, done + again, 4 * 2]
    assert orders((), (-1, 0, 0, 1)).tolist() == [0, 5, *walk, *[0] * 25]
    assert orders((), (-1, -1)).tolist()[:4] == [0, 2, 4 * 0, 4 * 1 + again]


def test_every_row_has_its_own_path_under_its_taps():
    assert sources((-1, 0, 1), 3).tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert sources((-1, 0, 0), 3).tolist() == [0, 1, 2, 1, 2, 3, 1, 2, 4]
    assert sources((-1,), 4).tolist() == [0, 1, 2, 3, 0, 0, 0, 0]  # filled up to eight


def stepping():
    pairs = []
    for small, parents in enumerate([range(-1, 4), (-1, 0, 1, 0, 1)]):
        sizes = {"rows": 5, "dim": 64, "taped": 4, "small": 3 * small}
        products, mixer, before, _ = arguments(DELTA_NET, **sizes)
        given = products, mixer, before._replace(tape=before.tape._replace(path=[0, 2])), parents
        pairs += zip(map(exact, parts(delta_net(*given))), expected(*given), strict=True)
    return pairs


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("gated_delta", stepping, {
        "one row too many is replayed": ("at < replayed;", "at <= replayed;", "bounds or result"),
        "one row too few": ("at < replayed;", "at + 1 < replayed;", "result"),
        "the tape's first rows, whatever stays": ("from = orders[2 + at]", "from = at", "result"),
        "the tape's keys are this pass's": ("key = taped_k + from", "key = k + from", "result"),
        "the state of the pass before": ("begun[place + i] = now[i];",
            "begun[place + i] = state[place + i];", "result"),
        "branches go on from the last row": ("(order & 2) != 0 ? root[i] : now[i]", "now[i]",
            "result"),
        "another row's delta": ("simd_shuffle(kept, node)", "simd_shuffle(kept, 0)", "result"),
        "no decay of what is held": (": now[i]) * decay", ": now[i])", "result"),
        "the sum of one lane": ("held = simd_sum(held);", "", "result"),
        "only the first lanes add up": ("held = simd_sum(held);",
            "held = lane < 16 ? simd_sum(held) : 0.0f;", "divergence"),
        "queries before the row": ("out += now[i] * query[i];",
            "out += root[i] * query[i];", "result"),
        "every lane writes": ("if (lane == 0) {\n      y", "if (true) {\n      y", "race"),
        "heads of values have keys of their own": ("head / (HV / HK)", "head", "bounds or result"),
    }),
    ("delta_inputs", stepping, {
        "the rows before, not the path": ("from = sources[row * TAPS + tap]", "from = row + tap",
            "result"),
        "a tap too few": ("tap < TAPS;", "tap + 1 < TAPS;", "result"),
        "rows as if nothing stood between them": ("(from - BEFORE) * step",
            "(from - BEFORE) * WIDTH", "bounds or result"),
        "gates as if nothing stood between them": ("a[row * a_strides[1] + gate]",
            "a[row * HV + gate]", "bounds or result"),
        "no activation": ("sum / (1.0f + exp(-sum))", "sum", "result"),
        "values are normed as well": ("if (head < 2 * HK) {\n  size", "if (true) {\n  size",
            "result"),
        "keys are scaled as queries": ("head < HK ? rsqrt", "head < 2 * HK ? rsqrt", "result"),
        "the sum of one lane": ("rsqrt(simd_sum(squares) + 1e-6f)", "rsqrt(squares + 1e-6f)",
            "result"),
        "no epsilon": ("simd_sum(squares) + 1e-6f", "simd_sum(squares)", "result"),
        "rates are no logarithms": ("-exp(float(rates[gate]))", "-float(rates[gate])", "result"),
        "no bias": (" + float(biases[gate])", "", "result"),
        "the state is left out of the window": ("from < BEFORE; from += rows", "from < 0; ++from",
            "unwritten"),
        "heads of keys follow those of values": ("k + (row * HK + head - HK) * D",
            "k + (row * HK + head) * D", "bounds or race or result"),
    }),
)
