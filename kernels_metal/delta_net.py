"""A gated delta net between its products, in two launches: convolution, norms and gates; the rule.

The rule goes along a tree of rows, behind rows of an earlier pass that it replays first: what that
pass did to the state is on its tape, and which of its rows stay is known when they are verified. So
nothing is launched in between, and one state is read and one written, whatever branches there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from kernels_metal.checks import check, check_array, check_choice, check_range
from kernels_metal.factory import Kernel, Launch, Prepared
from kernels_metal.operation import Case, Draw, Operation, case_of

DIMS = (64, 128)
MAX_ROWS = 32  # a lane keeps the delta of one of them
SIMD_GROUPS = 4  # of a threadgroup of the rule, a row of the state each
EPSILON = 1e-6  # of the norms, as in mlx-lm
INPUTS = Kernel(
    "delta_inputs",
    inputs=("qkv", "a", "b", "convolved", "weight", "rates", "biases", "sources"),
    outputs=("q", "k", "v", "decays", "beta", "window"),
    ensure_row_contiguous=False,
)
RULE = Kernel(
    "gated_delta",
    inputs=(
        *("q", "k", "v", "decays", "beta", "state"),
        *("taped_k", "taped_decays", "taped_deltas", "orders"),
    ),
    outputs=("y", "begun", "deltas"),
)
Products = Sequence[mx.array]  # qkv [1, R, C], a and b [1, R, value heads]; rows at any stride


class Mixer(NamedTuple):
    """The weights between products and rule.

    weight: [C, taps, 1], C channels of queries, keys and values, head by head. rates: [value
    heads], logarithms. biases: [value heads]. key_heads: of queries and of keys.
    """

    weight: mx.array
    rates: mx.array
    biases: mx.array
    key_heads: int

    @property
    def dim(self) -> int:
        """Numbers of a head, queries', keys' or values'."""
        return int(self.weight.shape[0]) // (2 * self.key_heads + int(self.rates.size))


class Tape(NamedTuple):
    """What the rows of a pass did to the state, and those of them that stay, in order.

    k: float32 [1, M, key heads, D]. decays: float32 [1, M, value heads]. deltas: float32 [1, M,
    value heads, D]. path: rows, each behind its parent.
    """

    k: mx.array
    decays: mx.array
    deltas: mx.array
    path: Sequence[int] = ()


class Before(NamedTuple):
    """What was before a pass.

    convolved: [1, taps - 1, C], the last rows. state: float32 [1, value heads, D, D]. tape: of rows
    that are to be replayed behind it.
    """

    convolved: mx.array
    state: mx.array
    tape: Tape | None = None


class Step(NamedTuple):
    """What a pass gives.

    y: [1, R, value heads, D]. window: [1, taps - 1 + R, C] what was convolved. begun: the state
    behind the replayed rows. tape: of its own rows.
    """

    y: mx.array
    window: mx.array
    begun: mx.array
    tape: Tape


class DeltaNet:
    """A call for products of this shape, settled but for the arrays."""

    def __init__(self, products: Products, mixer: Mixer) -> None:
        dtype, rows, values = products[0].dtype, products[0].shape[1], mixer.rates.size
        (channels, taps, _), heads, dim = mixer.weight.shape, mixer.key_heads, mixer.dim
        v, gates = (1, rows, values, dim), (1, rows, values)
        settings = ("T", dtype), ("D", dim), ("HK", heads), ("HV", values)
        inputs = Launch(
            grid=(32, 2 * heads + values, rows),
            threadgroup=(32, 1, 1),
            output_shapes=(
                *((1, rows, heads, dim),) * 2,
                *(v, gates, gates, (1, taps - 1 + rows, channels)),
            ),
            output_dtypes=(*[mx.float32] * 5, dtype),
            template=(*settings, ("TAPS", taps)),
        )
        rule = Launch(
            grid=(32, dim, values),
            threadgroup=(32, SIMD_GROUPS, 1),
            output_shapes=(v, (1, values, dim, dim), v),
            output_dtypes=(dtype, mx.float32, mx.float32),
            template=settings,
        )
        self._inputs, self._rule = Prepared(INPUTS, inputs), Prepared(RULE, rule)
        nothing = mx.zeros(8)
        self._taps, self._no_tape = taps, Tape(nothing, nothing, nothing)
        self.key = inputs, rule

    def __call__(
        self, products: Products, mixer: Mixer, before: Before, parents: Sequence[int]
    ) -> Step:
        """As `delta_net`."""
        qkv, a, b = products
        given = self.given(before, parents)
        y, window, begun, k, decays, deltas = self.run(qkv, a, b, given, mixer[:3])
        return Step(y, window, begun, Tape(k, decays, deltas, range(len(parents))))

    def given(self, before: Before, parents: Sequence[int]) -> list[mx.array]:
        """What `run` reads of what was before, and of the order of rows."""
        convolved, state, tape = before
        k, decays, deltas, path = tape or self._no_tape
        rows = tuple(parents)
        order = orders(tuple(path), rows)
        return [convolved, sources(rows, self._taps), state, k, decays, deltas, order]

    def run(
        self, qkv: mx.array, a: mx.array, b: mx.array, given: Sequence[mx.array], weights: Any
    ) -> list[mx.array]:
        """y, window, begun and the tape's arrays, as of `Step`; nothing but arrays is asked for."""
        convolved, order, *behind = given
        *rows, window = self._inputs([qkv, a, b, convolved, *weights, order])
        y, begun, deltas = self._rule([*rows, *behind])
        return [y, window, begun, rows[1], rows[3], deltas]


def delta_net(products: Products, mixer: Mixer, before: Before, parents: Sequence[int]) -> Step:
    """One pass over rows, the row before each of which is in `parents`; -1 for what was before.

    Heads of 64 or 128 numbers, up to 32 rows. Raises ValueError for other shapes and dtypes.
    """
    check_arguments(products, mixer, before, parents)
    return DeltaNet(products, mixer)(products, mixer, before, parents)


Rule = Callable[..., tuple[mx.array, mx.array]]  # as mlx-lm's kernel: of q, k, v, decays, beta


def delta_net_reference(
    products: Products,
    mixer: Mixer,
    before: Before,
    parents: Sequence[int],
    rule: Rule | None = None,
) -> Step:
    """As `delta_net`, by MLX's own operations as mlx-lm writes them, with a state for every row.

    rule: computes y in the place of this, and there are no deltas.
    """
    qkv, a, b = products
    (channels, taps, _), rows, dim = mixer.weight.shape, qkv.shape[1], mixer.dim
    window = mx.concatenate([before.convolved, qkv], axis=1)
    if list(parents) == [*range(-1, rows - 1)]:
        found = mx.conv1d(window, mixer.weight, groups=channels)
    else:
        paths = window[0][sources(tuple(parents), taps)[: rows * taps].reshape(rows, taps)]
        found = mx.conv1d(paths, mixer.weight, groups=channels).swapaxes(0, 1)
    ends = [mixer.key_heads * dim, 2 * mixer.key_heads * dim]
    q, k, v = (x.reshape(1, rows, -1, dim) for x in mx.split(nn.silu(found), ends, axis=-1))
    q, k = (mx.fast.rms_norm(x, None, EPSILON / dim) for x in (q, k))
    q, k, beta = q / dim, dim**-0.5 * k, mx.sigmoid(b)
    decays = mx.exp(-mx.exp(mixer.rates.astype(mx.float32)) * nn.softplus(a + mixer.biases))
    begun = before.state if before.tape is None else replayed(before.state, before.tape)
    if rule is not None:
        y, deltas = rule(q, k, v, decays, beta, begun)[0], mx.zeros(v.shape)
    else:
        y, deltas = _walked((q, k, v, decays, beta), begun, parents)
    return Step(y, window, begun, Tape(k, decays, deltas, range(rows)))


def _walked(
    rows: Sequence[mx.array], begun: mx.array, parents: Sequence[int]
) -> tuple[mx.array, mx.array]:
    q, k, v, decays, beta = rows
    q, k = (mx.repeat(x, v.shape[2] // x.shape[2], 2)[0, :, :, None] for x in (q, k))
    states, ys, deltas = [begun], [], []
    for row, parent in enumerate(parents):
        held = states[parent + 1] * decays[0, row, :, None, None]
        deltas.append((v[:, row] - (held * k[row]).sum(-1)) * beta[:, row, :, None])
        states.append(held + k[row] * deltas[-1][..., None])
        ys.append((states[-1] * q[row]).sum(-1).astype(v.dtype))
    return mx.stack(ys, axis=1), mx.stack(deltas, axis=1)


def replayed(state: mx.array, tape: Tape) -> mx.array:
    """The state behind the rows that stay, by MLX's own operations."""
    shared = tape.decays.shape[2] // tape.k.shape[2]
    for row in tape.path:
        key = mx.repeat(tape.k[:, row], shared, 1)[:, :, None]
        decay = tape.decays[:, row, :, None, None]
        state = state * decay + key * tape.deltas[:, row, :, :, None]
    return state


@lru_cache(256)
def sources(parents: tuple[int, ...], taps: int) -> mx.array:
    """int32 [R * taps], or 8: the rows of the window under each row's taps, in order."""
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else tuple(range(taps - 1))
        paths.append((*above[-(taps - 1) :], taps - 1 + row))
    return _padded([at for path in paths for at in path])


@lru_cache(256)
def orders(path: tuple[int, ...], parents: tuple[int, ...]) -> mx.array:
    """What the rule does one after the other: a walk into the depth, so one state is enough.

    Where a branch begins, its ancestors are done again from the first state.
    """
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)
    walk: list[int] = []
    last, ahead = -1, children[-1][::-1]
    while ahead:
        row = ahead.pop()
        above: list[int] = []
        parent, is_branch = parents[row], last != parents[row]
        while is_branch and parent >= 0:
            above.insert(0, parent)
            parent = parents[parent]
        steps = [*(4 * node + 1 for node in above), 4 * row]
        steps[0] += 2 * is_branch
        walk += steps
        last, ahead = row, ahead + children.get(row, [])[::-1]
    numbers = [len(path), len(walk), *path, *walk]
    return _padded(numbers, -(-len(numbers) // 32) * 32)  # few sizes, by which graphs are traced


def _padded(numbers: list[int], size: int = 8) -> mx.array:
    return mx.array([*numbers, *[0] * (size - len(numbers))])  # in device memory


def check_arguments(
    products: Products, mixer: Mixer, before: Before, parents: Sequence[int]
) -> None:
    """Raise ValueError for arguments the kernels do not take."""
    qkv, a, b = products
    check_array("weight", mixer.weight, (None, None, 1))
    channels, taps, _ = mixer.weight.shape
    values, dim, dtype = mixer.rates.size, mixer.dim, (mixer.weight.dtype,)
    check_range("the taps of the convolution", taps, 2, 8)
    check_choice("the head dim", dim, DIMS)
    whole = (2 * mixer.key_heads + values) * dim
    check(channels == whole, "the channels", channels, f"{whole}, of heads of one width")
    shared = f"a multiple of {mixer.key_heads}"
    check(values % mixer.key_heads == 0, "the heads of values", values, shared)
    check_array("qkv", qkv, (1, None, channels), dtype)
    rows = qkv.shape[1]
    check_range("the rows of qkv", rows, 1, MAX_ROWS)
    for name, gate in (("a", a), ("b", b)):
        check_array(name, gate, (1, rows, values), dtype)
    for name, each in (("rates", mixer.rates), ("biases", mixer.biases)):
        check_array(name, each, (values,))
    check_array("convolved", before.convolved, (1, taps - 1, channels), dtype)
    check_array("state", before.state, (1, values, dim, dim), (mx.float32,))
    known = len(parents) == rows and all(-1 <= p < row for row, p in enumerate(parents))
    check(known, "parents", list(parents), f"{rows} earlier rows or -1")
    if (tape := before.tape) is not None:
        kept = tape.k.shape[1]
        check_array("the tape's k", tape.k, (1, None, mixer.key_heads, dim), (mx.float32,))
        check_array("its decays", tape.decays, (1, kept, values), (mx.float32,))
        check_array("its deltas", tape.deltas, (1, kept, values, dim), (mx.float32,))
        check(all(0 <= row < kept for row in tape.path), "its path", tape.path, "rows of it")


def _case(products: Products, mixer: Mixer, *_: Any) -> Case:
    shape = (mixer.key_heads, mixer.rates.size, mixer.dim, mixer.weight.shape[1])
    return case_of(products[0].shape[1], shape, [products[0], mixer.rates])


def _after(out: Step, products: Products, *rest: Any) -> tuple[Any, ...]:
    return (mx.minimum(products[0], out.y[:, :, 0, :1]), *products[1:]), *rest


def _compared(out: Step, *_: Any) -> list[mx.array]:
    """In y's dtype, to which mlx-lm rounds in between, where the kernels do not."""
    return [*out[:3], *(array.astype(out.y.dtype) for array in out.tape[:3])]


def _arguments(draw: Draw) -> tuple[Any, ...]:
    """Products side by side, as one product gives them."""
    rows, dim = draw.size("rows", (1, 2, 5, 8, 31, 32)), draw.size("dim", DIMS)
    heads, taps = draw.size("heads", (1, 2)), draw.size("taps", (2, 4))
    values = heads * draw.size("shared", (1, 2))
    widths = (2 * heads + values) * dim, values, values
    size = 10.0 ** -draw.extra("small", (0, 0, 3))  # so small that epsilon counts
    whole = size * draw.normal(1, rows, sum(widths))
    products = mx.split(whole, [widths[0], widths[0] + values], axis=-1)
    weight = draw.normal(widths[0], taps, 1)
    convolved = size * draw.normal(1, taps - 1, widths[0])
    mixer = Mixer(weight, draw.normal(values).astype(mx.float32), draw.normal(values), heads)
    state, tape = mx.random.normal((1, values, dim, dim), key=draw.key()), None
    if taped := draw.extra("taped", (0, 1, 4, 16)):
        shapes = (1, taped, heads, dim), (1, taped, values), (1, taped, values, dim)
        k, gates, deltas = (draw.normal(*shape).astype(mx.float32) for shape in shapes)
        path = [row for row in range(taped) if draw.given or draw.rng.random() < 0.7]
        tape = Tape(k / dim**0.5, mx.sigmoid(gates), deltas, path)
    return tuple(products), mixer, Before(convolved, state, tape), draw.parents(rows)


def _tried(products: Products, mixer: Mixer, *_: Any) -> tuple[str, list[dict[str, int]]]:
    shared, taps = mixer.rates.size // mixer.key_heads, mixer.weight.shape[1]
    sizes = {"heads": mixer.key_heads, "shared": shared, "dim": mixer.dim, "taps": taps}
    words = f"{mixer.key_heads} and {mixer.rates.size} heads of {mixer.dim}, {taps} taps"
    return words, [{**sizes, "rows": 8}, {**sizes, "rows": 3, "taped": 4}]


DELTA_NET = Operation(
    name="delta_net",
    kernel=delta_net,
    reference=delta_net_reference,
    check=check_arguments,
    case=_case,
    kernels=(INPUTS, RULE),
    arguments=_arguments,
    defaults={"rows": 8, "heads": 2, "shared": 2, "dim": 128, "taps": 4},
    compared=_compared,
    after=_after,
    tried=_tried,
    variants=[{"dim": dim} for dim in DIMS],
)
