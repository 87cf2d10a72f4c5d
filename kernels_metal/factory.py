"""The one place where a kernel is launched, on Metal or by another executor.

`norm_rope.py` is the shortest example. Nothing here falls back by itself: who calls a kernel asks
`executor()` first, and takes the reference when that is None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

SOURCE = Path(__file__).parent / "source"

Setting = tuple[str, mx.Dtype | int | bool]
Dimensions = tuple[int, int, int]
TYPES = {  # as MLX's text names them
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}


@dataclass(frozen=True)
class Kernel:
    """A kernel: its body is the file `{name}.metal` of `folder`.

    `inputs` and `outputs` are the parameter names in the body. `header` names another file of the
    folder, without `.metal`, for functions and structs outside the body. With
    `ensure_row_contiguous` MLX copies strided inputs first; without, the body must use
    `{input}_strides`. falls_back: whoever launches it has another kernel for a GPU that has no
    registers for so many threads. before: for names that are no inputs, text in front of the
    file's in its first line, so that the emulator counts lines as the file does.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str | None = None
    ensure_row_contiguous: bool = True
    folder: Path = SOURCE
    falls_back: bool = False
    before: str = ""

    @property
    def body(self) -> str:
        """The text of the body."""
        return self.before + self.path.read_text(encoding="utf-8")

    @property
    def header_text(self) -> str:
        """The text of the header, "" without one."""
        return self.header_path.read_text(encoding="utf-8") if self.header_path else ""

    @property
    def sent(self) -> tuple[str, str]:
        """Header and body as MLX gets them, which copies both in every call: without comments."""
        return compact(self.header_text), compact(self.body)

    @property
    def path(self) -> Path:
        """The file of the body."""
        return self.folder / f"{self.name}.metal"

    @property
    def header_path(self) -> Path | None:
        """The file of the header."""
        return self.folder / f"{self.header}.metal" if self.header else None


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: the arguments of MLX's custom kernels, less the inputs.

    `grid` counts threads, not threadgroups. `template` gives the body's types and constants, which
    become its first lines: MLX would work templates of its own out again in every call.
    """

    grid: Dimensions
    threadgroup: Dimensions
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    template: tuple[Setting, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """As MLX takes them."""
        names = ("grid", "threadgroup", "output_shapes", "output_dtypes")
        return {name: list(getattr(self, name)) for name in names}


def settled(kernel: Kernel, template: tuple[Setting, ...]) -> tuple[str, str]:
    """The name of the kernel with these types and constants, and the lines that define them."""
    names, lines = [kernel.name], []
    for word, value in template:
        if isinstance(value, mx.Dtype):
            names.append(TYPES[value])
            lines.append(f"using {word} = {TYPES[value]};\n")
        else:
            names.append(f"{value:d}".replace("-", "_"))
            lines.append(f"constexpr {type(value).__name__} {word} = {value:d};\n")
    return "_".join(names), "".join(lines)


# Runs a kernel; the outputs have the shapes and dtypes of the plan.
Executor = Callable[[Kernel, Sequence[mx.array], Launch], list[mx.array]]
_chosen: ContextVar[Executor | None] = ContextVar("executor", default=None)


@contextmanager
def executing(chosen: Executor) -> Iterator[None]:
    """Inside the block, and in no other thread or task, kernels run on `chosen`."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def executor() -> Executor | None:
    """What would run a kernel here: the block's executor, else Metal, else None."""
    return _chosen.get() or (metal if mx.metal.is_available() else None)


def launch(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> list[mx.array]:
    """Run a kernel; one array for each of its outputs.

    Raises RuntimeError where nothing can run kernels: the caller was to take the reference.
    """
    return Prepared(kernel, plan)(list(inputs))


def compact(source: str) -> str:
    """Source without comments, indentation and empty lines."""
    lines = (line.partition("//")[0].strip() for line in source.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def metal(
    kernel: Kernel, inputs: Sequence[mx.array], plan: Launch, verbose: bool = False
) -> list[mx.array]:
    """The executor that is MLX's own.

    verbose: print the text it generates; in a traced graph it does so even without Metal.
    """
    outputs: list[mx.array] = _compiled(kernel, plan.template)(
        inputs=list(inputs), **plan.arguments, verbose=verbose
    )
    return outputs


class Prepared:
    """A launch that is made many times, of which everything but the inputs is settled.

    It costs the host little more than MLX's own call: the executor is asked for, nothing else.
    """

    def __init__(self, kernel: Kernel, plan: Launch) -> None:
        self.kernel, self.plan, self._arguments = kernel, plan, plan.arguments

    def __call__(self, inputs: list[mx.array]) -> list[mx.array]:
        """The outputs for these inputs, as by `launch`."""
        chosen = _chosen.get()
        if chosen is not None and chosen is not metal:
            return chosen(self.kernel, inputs, self.plan)
        outputs: list[mx.array] = self._call(inputs=inputs, **self._arguments)
        return outputs

    @functools.cached_property
    def _call(self) -> Callable[..., list[mx.array]]:
        if executor() is None:
            problem = "no Metal and no executor; take the reference"
            raise RuntimeError(f"kernel {self.kernel.name}: {problem}")
        return _compiled(self.kernel, self.plan.template)  # type: ignore[no-any-return]


class Step(NamedTuple):
    """Work on arrays of one shape, settled but for them: `step(*given)` is `run(*given, arrays)`.

    Steps of one key do the same with arrays of their own, so a graph made of `run` serves them all.
    """

    key: Hashable
    arrays: Sequence[mx.array]  # weights, and sizes that a kernel reads
    run: Callable[..., Any]

    def __call__(self, *given: mx.array, **how: Any) -> Any:
        """What `run` gives for arrays and its own."""
        return self.run(*given, self.arrays, **how)


@functools.cache
def _compiled(  # type: ignore[no-untyped-def]  # MLX gives it the type object
    kernel: Kernel, template: tuple[Setting, ...]
):
    header, body = kernel.sent
    name, definitions = settled(kernel, template)
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=definitions + body,
        header=header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
    )
