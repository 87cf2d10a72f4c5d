"""The text MLX generates around a kernel's body, without Metal.

A test compares it with what MLX prints for every kernel of the catalog, so it cannot drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kernels_metal.factory import TYPES, Kernel, Launch, settled

CONSTANT_BELOW = 8  # elements: smaller inputs come as `constant`

# Given to the kernel when its body mentions the name; in MLX's order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


@dataclass(frozen=True)
class Parameter:
    """A buffer of the kernel: `of` is the input or output, `part` what of it ("" for its elements).

    `reference` is true where MLX passes one value by reference instead of a pointer.
    """

    type: str
    name: str
    of: str
    part: str = ""
    reference: bool = False

    @property
    def declaration(self) -> str:
        """As in the text, without the buffer's number."""
        return f"{self.type}{'&' if self.reference else '*'} {self.name}"


@dataclass(frozen=True)
class Signature:
    """MLX's text in pieces; `head`, body and `tail` follow each other."""

    function: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]
    head: str
    tail: str


def signature(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> str:
    """All that MLX would compile: header, generated signature and body."""
    pieces = generate(kernel, inputs, plan)
    header, body = kernel.sent
    return header + pieces.head + body + pieces.tail


def generate(kernel: Kernel, inputs: Sequence[mx.array], plan: Launch) -> Signature:
    """The pieces around the body."""
    body = kernel.sent[1]  # names in comments do not count
    name, definitions = settled(kernel, plan.template)
    function = _function_name(name, inputs, plan)
    parameters = (*_input_parameters(kernel, inputs, body), *_output_parameters(kernel, plan))
    attributes = tuple(name for name in ATTRIBUTES if name in body)
    declared = [f"  {p.declaration} [[buffer({i})]]" for i, p in enumerate(parameters)]
    declared += [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in attributes]
    head = f"[[kernel]] void {function}(\n" + ",\n".join(declared) + ") {\n" + definitions
    return Signature(function, parameters, attributes, head, "\n}\n")


def _function_name(name: str, inputs: Sequence[mx.array], plan: Launch) -> str:
    name = f"custom_kernel_{name}"
    name += "".join(f"_{TYPES[x.dtype]}{_storage_letter(x)}" for x in inputs)
    return name + "".join(f"_{TYPES[dtype]}" for dtype in plan.output_dtypes)


def _storage_letter(x: mx.array) -> str:
    if x.ndim == 0:
        return "s"
    return "c" if x.size < CONSTANT_BELOW else ""


def _input_parameters(kernel: Kernel, inputs: Sequence[mx.array], body: str) -> list[Parameter]:
    result = []
    for name, x in zip(kernel.inputs, inputs, strict=True):
        space = "constant" if x.size < CONSTANT_BELOW else "device"
        scalar = x.ndim == 0
        result.append(Parameter(f"const {space} {TYPES[x.dtype]}", name, name, "", scalar))
        if scalar:
            continue
        for part, kind in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
            full = f"{name}_{part}"
            if full in body:
                result.append(Parameter(f"const constant {kind}", full, name, part, part == "ndim"))
    return result


def _output_parameters(kernel: Kernel, plan: Launch) -> list[Parameter]:
    return [
        Parameter(f"device {TYPES[dtype]}", name, name)
        for name, dtype in zip(kernel.outputs, plan.output_dtypes, strict=True)
    ]
