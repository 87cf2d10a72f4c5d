"""Matrix product for the few rows of a verification or a draft, reading each weight once.

Weights are packed in one of MLX's ways, or as they are.

Two kernels: `verify_qmm` adds in single lanes and is for the fewest rows, and for GPUs without safe
8x8 matrices; `verify_qmm_matrix` multiplies through those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx

from kernels_metal.checks import (
    FLOATS,
    check,
    check_array,
    check_choice,
    check_contiguous,
    check_range,
)
from kernels_metal.factory import Kernel, Launch, Prepared, Step
from kernels_metal.gpu import few_rows, fewest_unpacked, may_use_matrices
from kernels_metal.operation import Case, Draw, Operation, case_of

BITS, GROUPS = (4, 6, 8), (32, 64, 128)
GROUPS_OF_6 = (64,)  # what `mx.quantize` takes by default, as files of 6 bits have it
# What `mx.quantize` calls the ways of packing, and weights that are not packed; how many bits and
# weights along K have one scale in them, where that is settled; and what the kernels do, their FORM
MODES: dict[str, tuple[tuple[int, int] | None, int]] = {
    "affine": (None, 0),
    "mxfp4": ((4, 32), 1),
    "nvfp4": ((4, 16), 2),
    "mxfp8": ((8, 32), 1),
    "none": ((16, 32), 3),
}
STEP = 32  # weights along K that are multiplied together, where a scale is for fewer
MAX_ROWS = 32
FEW_ROWS = 5  # up to here lanes add by themselves
SIMD_GROUPS = 8
RUN = 256  # weights along K that a SIMD-group of the scalar kernel reads at a time
WANTED = 1024  # SIMD-groups of the scalar kernel, to fill the cores of a large GPU
WIDE = 1024  # columns from which on a SIMD-group of the matrix kernel takes several tiles of them
TILE = 8  # rows or columns of a matrix
_INPUTS = ("x", "weights", "scales", "biases", "sizes")
SCALAR = Kernel("verify_qmm", inputs=_INPUTS, outputs=("y",), header="lanes")
MATRIX = Kernel("verify_qmm_matrix", inputs=_INPUTS, outputs=("y",), header="lanes")
Way = Literal["scalar", "matrix"]
Matrix = tuple[mx.array, mx.array | None, mx.array | None]  # weights, scales and biases


@dataclass(frozen=True)
class Packing:
    """How weights are stored: 4, 6 or 8 bits, one scale and bias for 32, 64 or 128 along K.

    Of 6 bits for 64. mode: as MLX names it; other modes than affine have a size, see MODES, and no
    biases, and "none" has no scales either. invariant: sum every row as if it were alone, so that n
    rows give the bits of n single rows. Otherwise the kernel, and with it the order of the sum, is
    what suits the number of rows. gated: the matrix is two, of which the first gives gates for the
    second: y = silu(x A^T) * (x B^T), as in most MLPs (SwiGLU, arXiv 2002.05202). Raises ValueError
    for another packing.
    """

    bits: int
    group: int
    invariant: bool = False
    gated: bool = False
    mode: str = "affine"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, tuple(MODES))
        size = MODES[self.mode][0]
        check_choice("bits", self.bits, BITS if size is None else size[:1])
        groups = GROUPS_OF_6 if self.bits == 6 else GROUPS
        check_choice("group", self.group, groups if size is None else size[1:])

    @property
    def form(self) -> int:
        """Of the kernels."""
        return MODES[self.mode][1]

    @property
    def more(self) -> list[str]:
        """What comes with the weights."""
        return ["scales", "biases"][: (2, 1, 1, 0)[self.form]]

    @property
    def step(self) -> int:
        """Weights along K that a SIMD-group multiplies together."""
        return max(self.group, STEP)


UNPACKED = Packing(16, 32, mode="none")  # of 16 bits or 32, as many as x has
PACKINGS = [
    *(Packing(bits, group) for bits in (4, 8) for group in GROUPS),
    *(Packing(6, group) for group in GROUPS_OF_6),
    *(Packing(*size, mode=mode) for mode, (size, _) in MODES.items() if size),
]


class Product:
    """x times the transposed dequantised weights, checked once and planned once for each shape.

    weights: uint32 [N, K * bits / 32]. scales: [N, K / group], of 8 bits in the modes that are not
    affine. biases: the same, None in these. Weights that are not packed are [N, K], without scales.
    Raises ValueError for other shapes and dtypes, and for arrays with gaps.
    """

    def __init__(
        self,
        weights: mx.array,
        scales: mx.array | None,
        biases: mx.array | None,
        packing: Packing,
    ) -> None:
        is_packed = packing.mode != "none"
        check_array("weights", weights, (None, None), (mx.uint32,) if is_packed else FLOATS)
        columns, width = weights.shape
        depth = width * 32 // packing.bits if is_packed else width
        fits, limit = depth % packing.step == 0, f"a multiple of {packing.step}"
        check(fits, "the columns of x that weights are for", depth, limit)
        check_contiguous("weights", weights)
        more = {name: a for name, a in (("scales", scales), ("biases", biases)) if a is not None}
        check([*more] == packing.more, "what comes with weights", [*more], str(packing.more))
        dtypes = (mx.uint8,) if packing.form else FLOATS
        for name, array in more.items():
            check_array(name, array, (columns, depth // packing.group), dtypes)
            check_contiguous(name, array)
            dtypes = (array.dtype,)
        # What is missing is bound to what is there, and never read
        self.arrays = [weights, *more.values(), *[weights] * (2 - len(more))]
        self._dtypes = FLOATS if packing.form in (1, 2) else (self.arrays[1].dtype,)  # of x
        self.packing, self.depth, self.columns = packing, depth, columns
        self.halves = 2 if packing.gated else 1
        even = self.columns % self.halves == 0
        check(even, "the rows of weights", self.columns, "even, where they are gated")
        self._settled: dict[tuple[Any, ...], Step] = {}

    def __call__(self, x: mx.array, way: Way | None = None) -> mx.array:
        """[..., N] for x [..., K] of 1 to 32 rows, of the dtype of the scales; sums are float32.

        N / 2 columns where gated, and 16 rows at most by the scalar kernel. way: which kernel; by
        default what suits the number of rows.
        """
        key = x.shape, x.dtype, way
        if key not in self._settled:
            self._settled[key] = self.settled(x, way)
        return self._settled[key](x)  # type: ignore[no-any-return]

    def settled(self, x: mx.array, way: Way | None = None) -> Step:
        """A product for every x of this shape and dtype, with nothing left to look up."""
        run, sizes = self._plan(x, way)
        key = run.kernel.name, run.plan
        return Step(key, [*self.arrays, sizes], lambda x, arrays: run([x, *arrays])[0])

    def way(self, rows: int) -> Way:
        """The kernel by which so many rows are multiplied."""
        if self.columns < TILE or not may_use_matrices():
            return "scalar"
        return "matrix" if self.packing.invariant or rows > FEW_ROWS else "scalar"

    def _plan(self, x: mx.array, way: Way | None) -> tuple[Prepared, mx.array]:
        check_array("x", x, (*x.shape[:-1], self.depth), self._dtypes)
        rows = math.prod(x.shape[:-1])
        most = MAX_ROWS if self.packing.invariant else few_rows()
        if most == 0:
            raise ValueError("the GPU is one whose own product is faster for few rows, or unknown")
        is_free = self.packing.mode != "none" or self.packing.invariant
        check_range("the rows of x", rows, 1 if is_free else fewest_unpacked(), most)
        plan = self._matrix if (way or self.way(rows)) == "matrix" else self._scalar
        return plan(rows, x)

    def _scalar(self, rows: int, x: mx.array) -> tuple[Prepared, mx.array]:
        held = _columns_held(rows)
        check_range("the rows of x", rows, 1, MAX_ROWS // self.halves)
        each = _columns_held(1) if self.packing.invariant else held
        parts = _parts(self.columns // each, WANTED, self.depth // RUN)
        template = (("COLS", held),)
        run = self._prepared(SCALAR, x, SIMD_GROUPS // parts * held, template)
        return run, self._sizes(rows, self.packing.group.bit_length() - 1, parts)

    def _matrix(self, rows: int, x: mx.array) -> tuple[Prepared, mx.array]:
        """As many parts for every number of rows, so that all are summed in one order.

        Eight wherever K has as many groups: SIMD-groups side by side then read whole lines of
        memory together, and a matrix of any size fills the cores of a large GPU.
        """
        tiles, group = -(-rows // TILE), self.packing.step
        parts = _parts(1, SIMD_GROUPS, self.depth // group)
        across = 4 if self.columns >= WIDE and tiles <= 2 else 2 if self.columns >= WIDE else 1
        across = max(across, self.halves)
        template = ("GROUP", group), ("TILES", tiles), ("COLS", across)
        run = self._prepared(MATRIX, x, SIMD_GROUPS // parts * across * TILE, template)
        return run, self._sizes(rows, parts)

    def _prepared(
        self, kernel: Kernel, x: mx.array, held: int, template: tuple[tuple[str, int], ...]
    ) -> Prepared:
        """held: rows of the weights for each threadgroup."""
        columns, threads = self.columns // self.halves, SIMD_GROUPS * 32
        plan = Launch(
            grid=(-(-columns // (held // self.halves)) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=((*x.shape[:-1], columns),),
            output_dtypes=(x.dtype,),
            template=(
                *(("T", x.dtype), ("BITS", self.packing.bits), ("FORM", self.packing.form)),
                *(*template, ("GATED", self.packing.gated)),
            ),
        )
        return Prepared(kernel, plan)

    def _sizes(self, rows: int, *more: int) -> mx.array:
        return mx.array([rows, self.depth, self.columns // self.halves, *more])


def verify_qmm(  # noqa: PLR0913  # the arrays of a quantised layer, and two choices
    x: mx.array,
    weights: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    packing: Packing,
    way: Way | None = None,
) -> mx.array:
    """Rows x [..., K] times the transposed dequantised weights: [..., N]; see `Product`."""
    return Product(weights, scales, biases, packing)(x, way)


def stock(x: mx.array, matrix: Matrix, packing: Packing) -> mx.array:
    """Of x and a matrix transposed, by MLX."""
    if packing.mode == "none":
        return x @ matrix[0].T
    kind: Any = {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}
    return mx.quantized_matmul(x, *matrix, **kind)  # type: ignore[arg-type]


def verify_qmm_reference(
    x: mx.array,
    weights: mx.array,
    scales: mx.array | None,
    biases: mx.array | None,
    packing: Packing,
) -> mx.array:
    """As `verify_qmm`, by MLX's own product; row by row where the rows must not mind each other."""

    def product(rows: mx.array) -> mx.array:
        y = stock(rows, (weights, scales, biases), packing)
        return swiglu(*mx.split(y, 2, axis=-1)) if packing.gated else y

    if not packing.invariant or x.shape[0] == 1:
        return product(x)
    return mx.concatenate([product(x[i : i + 1]) for i in range(x.shape[0])])


@partial(mx.compile, shapeless=True)
def swiglu(gates: mx.array, x: mx.array) -> mx.array:
    """silu(gates) * x, in one launch as of mlx-lm."""
    return gates * mx.sigmoid(gates) * x


def _columns_held(rows: int) -> int:
    """Columns of one SIMD-group: rows times columns are sums in registers."""
    return 4 if rows <= 8 else 2 if rows <= 16 else 1


def _parts(count: int, wanted: int, most: int) -> int:
    """SIMD-groups that share the sum over K of the same columns, of which there are `count`."""
    parts = 1
    while parts < SIMD_GROUPS and count * parts < wanted and parts * 2 <= most:
        parts *= 2
    return parts


def check_arguments(x: mx.array, *rest: Any) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    Product(*rest)._plan(x, None)


def _case(x: mx.array, weights: mx.array, *rest: Any) -> Case:
    *more, packing = rest
    kind = packing.invariant + 2 * packing.gated + 4 * [*MODES].index(packing.mode)
    shape = (x.shape[-1], weights.shape[0], packing.group, kind)
    floats = [x, *({0: more, 3: [weights]}.get(packing.form, ()))]
    return case_of(math.prod(x.shape[:-1]), shape, floats, packing.bits)


def _ways(x: mx.array, *rest: Any) -> tuple[Way, ...]:
    """Both kernels, where sums may be in either order and matrices can be used."""
    product, rows = Product(*rest), math.prod(x.shape[:-1])
    if product.packing.invariant or product.columns < TILE or not may_use_matrices():
        return (product.way(rows),)
    return ("scalar", "matrix") if rows <= MAX_ROWS // product.halves else ("matrix",)


def _after(y: mx.array, x: mx.array, *rest: Any) -> tuple[Any, ...]:
    """X that depends on y, by one small kernel."""
    return mx.minimum(x, y[..., :1]), *rest


def _tried(x: mx.array, *rest: Any) -> tuple[str, list[dict[str, int]]]:
    """Every variant of both kernels for these bits, groups and dtype."""
    packing = rest[3]
    same = {**_named(packing), "gated": int(packing.gated)}
    most = few_rows()
    shapes = [(rows, 1024, columns) for rows in (1, 9, 17, 25) for columns in (104, 1040)]
    shapes = [shape for shape in shapes if shape[0] <= most] + [(8, 128, 1040)]
    names = ("rows", "depth", "columns")
    sizes = [{**dict(zip(names, shape, strict=True)), **same} for shape in shapes]
    kind = packing.mode if packing.form else f"{packing.bits}/{packing.group}"
    return f"{kind}/gated" if packing.gated else kind, sizes


def _named(packing: Packing) -> dict[str, int]:
    """As sizes of a random call."""
    mode = [*MODES].index(packing.mode)
    return {"bits": packing.bits, "group": packing.group, "mode": mode}


def drawn_packing(draw: Draw) -> Packing:
    """Of a random call."""
    mode = [*MODES][draw.size("mode", range(len(MODES)))]
    if size := MODES[mode][0]:
        return Packing(*size, mode=mode)
    bits = draw.size("bits", BITS)
    return Packing(bits, draw.size("group", GROUPS_OF_6 if bits == 6 else GROUPS))


def drawn_matrix(draw: Draw, columns: int, depth: int, packing: Packing) -> Matrix:
    """Weights of a random call, of all values but what is no number."""
    if packing.form == 3:
        return draw.normal(columns, depth), None, None
    if packing.form:
        bytes_of = columns, depth * packing.bits // 8
        sizes, signs = (mx.random.randint(0, n, bytes_of, mx.uint8, draw.key()) for n in (127, 2))
        low, high = (110, 120) if packing.form == 1 else (1, 40)  # scales from 2^-17, 2^-9
        groups = columns, depth // packing.group
        scales = mx.random.randint(low, high, groups, mx.uint8, draw.key())
        return (sizes | signs << 7).view(mx.uint32), scales, None
    words = columns, depth * packing.bits // 32
    weights = mx.random.randint(0, 2**32, words, mx.uint32, key=draw.key())
    scales, biases = (draw.normal(columns, depth // packing.group) for _ in range(2))
    return weights, scales * 2.0**-packing.bits, biases


def _arguments(draw: Draw) -> tuple[Any, ...]:
    packing = drawn_packing(draw)
    rows = draw.size("rows", range(1, MAX_ROWS + 1))
    depth = draw.size("depth", [packing.step * steps for steps in (*range(1, 10), 20)])
    columns = draw.size("columns", (5, 8, 31, 33, 64, 100, 257))
    columns *= 2 if (gated := draw.chance("gated", 0.5)) else 1
    matrix = drawn_matrix(draw, columns, depth, packing)
    x = draw.normal(rows, depth)
    packing = replace(packing, invariant=draw.chance("invariant", 0.5), gated=gated)
    return x, *matrix, packing


VERIFY_QMM = Operation(
    name="verify_qmm",
    kernel=verify_qmm,
    reference=verify_qmm_reference,
    check=check_arguments,
    case=_case,
    kernels=(SCALAR, MATRIX),
    arguments=_arguments,
    defaults={"rows": 8, "depth": 1024, "columns": 256, "bits": 4, "group": 64, "mode": 0},
    ways=_ways,
    after=_after,
    tried=_tried,
    variants=[{**_named(packing), "gated": gated} for packing in PACKINGS for gated in (0, 1)],
)
