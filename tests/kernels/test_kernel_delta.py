"""The kernels of gated delta nets: what they make of a net's products, and the rule along trees."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernels_metal.checks import FLOATS
from kernels_metal.delta_inputs import (
    DELTA_INPUTS,
    delta_inputs,
    delta_inputs_reference,
    sources,
)
from kernels_metal.emulator import emulated
from kernels_metal.gated_delta import (
    GATED_DELTA,
    DeltaRows,
    Taped,
    gated_delta,
    gated_delta_reference,
    orders,
)
from support.kernels import arguments, assert_close, bytes_read, each_is_found, exact

CHAIN = range(-1, 11)
TREE = (-1, 0, 0, 1, 0, 3, 5, 4, 6, 8, 5, 2)
STAR = (-1, *[0] * 11)


# gated_delta


def stepped(state: np.ndarray, key, decay, delta) -> np.ndarray:
    return state * decay[:, None, None] + key[:, None] * delta[..., None]


def ruled(rows: DeltaRows, state: mx.array, taped: Taped | None, parents) -> list[np.ndarray]:
    """The gated delta rule as the papers write it, row by row in float64."""
    q, k, v, decays, beta = (exact(x)[0] for x in rows)
    k, q = (np.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in (k, q))
    begun, found, ys, deltas = exact(state)[0], [], [], []
    for row in taped.path if taped else ():
        key = np.repeat(exact(taped.k)[0, row], v.shape[1] // taped.k.shape[2], axis=0)
        begun = stepped(begun, key, exact(taped.decays)[0, row], exact(taped.deltas)[0, row])
    for row, parent in enumerate(parents):
        before = found[parent] if parent >= 0 else begun
        decayed = before * decays[row][:, None, None]
        held = np.einsum("hvk,hk->hv", decayed, k[row])
        deltas.append((v[row] - held) * beta[row][:, None])
        found.append(stepped(before, k[row], decays[row], deltas[-1]))
        ys.append(np.einsum("hvk,hk->hv", found[-1], q[row]))
    return [np.stack(ys)[None], begun[None], np.stack(deltas)[None]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parents", [CHAIN, TREE, STAR], ids=str)
@pytest.mark.parametrize("taped", [0, 5])
def test_kernel_and_reference_follow_the_rule_along_every_path(taped, parents, dtype):
    rows, state, tape, _ = arguments(GATED_DELTA, dtype, rows=12, dim=64, taped=taped)
    tape = tape and tape._replace(path=[0, 2, 3])
    right = ruled(rows, state, tape, parents)
    with emulated():
        kernel = gated_delta(rows, state, tape, parents)
    reference = gated_delta_reference(rows, state, tape, parents)
    for side in (kernel, reference):
        for found, expected, of in zip(side, right, (dtype, mx.float32, mx.float32), strict=True):
            assert_close(found, expected, of)


def test_a_walk_goes_back_to_the_first_state_where_a_branch_begins():
    chain = orders((4, 6), (-1, 0, 1)).tolist()
    assert chain == [2, 3, 4, 6, 0, 4, 8, 0]  # two replayed, three rows, filled up to eight
    done, again = 4 * 0 + 1, 2
    walk = [4 * 0, 4 * 1, 4 * 3, done + again, 4 * 2]
    assert orders((), (-1, 0, 0, 1)).tolist() == [0, 5, *walk, 0]
    assert orders((), (-1, -1)).tolist()[:4] == [0, 2, 4 * 0, 4 * 1 + again]


def ruling():
    pairs = []
    for parents in (range(-1, 4), (-1, 0, 1, 0, 1)):
        rows, state, tape, _ = arguments(GATED_DELTA, rows=5, dim=64, taped=4)
        given = rows, state, tape._replace(path=[0, 2]), parents
        pairs += zip(map(exact, gated_delta(*given)), ruled(*given), strict=True)
    return pairs


# delta_inputs


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def made(products, state: mx.array, mixer, parents) -> list[np.ndarray]:
    """What Qwen3.5's net makes of its products, path by path in float64."""
    qkv, a, b = (exact(x)[0] for x in products)
    weight, rates, biases = (exact(x) for x in mixer[:3])
    taps, dim = weight.shape[1], mixer.dim
    rows = []
    for row in range(len(parents)):
        path, at = [], row
        while at >= 0:
            path.insert(0, qkv[at])
            at = parents[at]
        last = np.stack([*exact(state)[0], *path])[-taps:]
        x = (last.T * weight[:, :, 0]).sum(1)
        rows.append(x * logistic(x))
    heads = np.stack(rows).reshape(len(rows), -1, dim)
    q, k, v = np.split(heads, [mixer.key_heads, 2 * mixer.key_heads], axis=1)
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    decays = np.exp(-np.exp(rates) * np.log1p(np.exp(a + biases)))
    window = np.concatenate([exact(state)[0], qkv])
    return [x[None] for x in (q / np.sqrt(dim), k, v, decays, logistic(b), window)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("parents", [CHAIN, TREE, STAR], ids=str)
@pytest.mark.parametrize("taps", [2, 4])
def test_kernel_and_reference_make_what_the_net_makes_along_every_path(taps, parents, dtype):
    given = (*arguments(DELTA_INPUTS, dtype, rows=12, dim=64, taps=taps)[:3], parents)
    with emulated():
        kernel = parts(delta_inputs(*given))
    reference = parts(delta_inputs_reference(*given))
    for i, (ours, stock, right) in enumerate(zip(kernel, reference, made(*given), strict=True)):
        of = mx.float32 if i == 3 else dtype
        assert_close(ours, right, of)
        assert (
            np.abs(exact(stock) - right).max()
            <= {4: 1e-4, 2: 0.1}[dtype.size] * np.abs(right).max()
        )


def test_every_row_has_its_own_path_under_its_taps():
    assert sources((-1, 0, 1), 3).tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    assert sources((-1, 0, 0), 3).tolist() == [0, 1, 2, 1, 2, 3, 1, 2, 4]
    assert sources((-1,), 4).tolist() == [0, 1, 2, 3, 0, 0, 0, 0]  # filled up to eight


def test_states_are_read_and_written_once():
    rows, state, tape, parents = arguments(GATED_DELTA, rows=12, dim=64, taped=4)
    with emulated() as run:
        gated_delta(rows, state, tape, TREE)
    (launch,) = run.counters
    assert launch.buffers["begun"].written == state.nbytes
    assert bytes_read(run, "gated_delta", "state") == state.nbytes


def parts(made) -> list[mx.array]:
    return [*made[0], made[1]]


def making():
    pairs = []
    for parents in (range(-1, 4), (-1, 0, 1, 0, 1)):
        given = (*arguments(DELTA_INPUTS, rows=5, dim=64)[:3], parents)
        pairs += zip(map(exact, parts(delta_inputs(*given))), made(*given), strict=True)
    return pairs


# By what is wrong: the source, what becomes of it, and what is found
# fmt: off
test_a_fault_is_found = each_is_found(
    ("gated_delta", ruling, {
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
        "queries before the row": ("out += now[i] * float(query[i]);",
            "out += root[i] * float(query[i]);", "result"),
        "every lane writes": ("if (lane == 0) {\n      y", "if (true) {\n      y", "race"),
        "heads of values have keys of their own": ("head / (HV / HK)", "head", "bounds or result"),
    }),
    ("delta_inputs", making, {
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
        "rates are no logarithms": ("-exp(float(rates[gate]))", "-float(rates[gate])", "result"),
        "no bias": (" + float(biases[gate])", "", "result"),
        "the state is left out of the window": ("from < BEFORE; from += rows", "from < 0; ++from",
            "unwritten"),
        "heads of keys follow those of values": ("k + (row * HK + head - HK) * D",
            "k + (row * HK + head) * D", "bounds or race or result"),
    }),
)
